//! Who this process is, by what its launcher put into the environment.

use std::fmt;

use warpweft_core_types::{Deadline, ErrorClass};

use crate::{
    Bind, Group, JoinConfig, JoinError, Rank, Rendezvous, RunId, Token, expand_host_list,
    unique_id::ParseUniqueIdError,
};

/// The port that torchrun takes where none is set.
const TORCH_PORT: u16 = 29500;

/// Ports that are derived from a job's number lie in the last 4096, as JAX chooses them.
const DERIVED_PORTS: (u16, u64) = (61440, 4096);

/// A launcher, by the variables that it sets; the earlier one counts where several are there and agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Family {
    /// `warpweft launch`, or variables that were set by hand.
    Warpweft,
    /// torchrun and what does as it does.
    Torchrun,
    /// Slurm's `srun`.
    Slurm,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI and others that speak PMI.
    Pmi,
}

/// Which variables a family has.
struct Names {
    family: Family,
    /// What chooses it in `WARPWEFT_ENVIRONMENT`.
    choice: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// Has to be there besides rank and size.
    mark: Option<&'static str>,
}

const FAMILIES: [Names; 5] = [
    Names {
        family: Family::Warpweft,
        choice: "warpweft",
        rank: "WARPWEFT_RANK",
        size: "WARPWEFT_WORLD_SIZE",
        local_rank: "WARPWEFT_LOCAL_RANK",
        local_size: "WARPWEFT_LOCAL_WORLD_SIZE",
        mark: None,
    },
    Names {
        family: Family::Torchrun,
        choice: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        mark: None,
    },
    Names {
        family: Family::Slurm,
        choice: "slurm",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
        mark: Some("SLURM_JOB_ID"),
    },
    Names {
        family: Family::OpenMpi,
        choice: "openmpi",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        mark: None,
    },
    Names {
        family: Family::Pmi,
        choice: "pmi",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        mark: None,
    },
];

/// The variables by which launchers say who a process is, for a launcher that has to clear others' words.
pub fn role_variables() -> impl Iterator<Item = &'static str> {
    let roles =
        FAMILIES.iter().flat_map(|names| [names.rank, names.size, names.local_rank, names.local_size]);
    roles.chain([CHOICE, "TORCHELASTIC_USE_AGENT_STORE"])
}

const CHOICE: &str = "WARPWEFT_ENVIRONMENT";
const ADDRESS: &str = "WARPWEFT_ADDRESS";
const TOKEN: &str = "WARPWEFT_TOKEN";
const RUN: &str = "WARPWEFT_RUN";
const BIND: &str = "WARPWEFT_BIND";

/// Looks a variable up.
type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Who this process is, and where its job meets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Environment {
    /// Whose variables count.
    pub family: Family,
    /// This process among all.
    pub rank: Rank,
    /// How many there are.
    pub size: u32,
    /// Its position among those of this host, if the launcher says so.
    pub local_rank: Option<u32>,
    /// How many there are on this host.
    pub local_size: Option<u32>,
    /// Where rank 0 is: `host:port`, `file:PATH` or `id:HEX`. A group of one may have none.
    pub address: Option<String>,
    /// The job's secret. Without `WARPWEFT_TOKEN` it is made of the run's name, which guards against mix-ups
    /// and not against others on the network.
    pub token: Token,
    /// The run, which differs between a job and the same job started again.
    pub run: RunId,
    /// Where rank 0 listens.
    pub bind: Bind,
}

impl Environment {
    /// Reads the environment of this process.
    ///
    /// # Errors
    ///
    /// No launcher's variables are there, some do not read, or two families contradict each other.
    pub fn of_process() -> Result<Self, EnvironmentError> {
        Self::read(&|name| std::env::var(name).ok())
    }

    /// The same with another way to look variables up.
    ///
    /// # Errors
    ///
    /// As [`of_process`](Self::of_process).
    pub fn read(lookup: &Lookup<'_>) -> Result<Self, EnvironmentError> {
        // An empty variable is one that is not set, as launchers and shells have it.
        let lookup = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let lookup: &Lookup<'_> = &lookup;
        let chosen = chosen(lookup)?;
        let mut roles = Vec::new();
        for names in &FAMILIES {
            if chosen.is_none_or(|family| family == names.family) {
                roles.extend(Role::read(names, lookup)?);
            }
        }
        for (at, role) in roles.iter().enumerate() {
            roles[..at].iter().try_for_each(|earlier| earlier.compare(role))?;
        }
        let Some(role) = roles.into_iter().next() else { return Err(nobody(lookup, chosen)) };
        Self::complete(role, lookup)
    }

    fn complete(role: Role, lookup: &Lookup<'_>) -> Result<Self, EnvironmentError> {
        let family = role.family;
        let run = run(family, lookup);
        let token = lookup(TOKEN).unwrap_or_else(|| run.as_str().to_owned());
        let (local_rank, local_size) =
            (role.local_rank.map(|it| it.value), role.local_size.map(|it| it.value));
        let size = role.size.value;
        let is_local = local_size == Some(size);
        let address = match lookup(ADDRESS) {
            Some(address) => Some(address),
            None if size == 1 => None,
            None => Some(address(family, is_local, &run, lookup)?),
        };
        Ok(Self {
            family,
            rank: Rank(role.rank.value),
            size,
            local_rank,
            local_size,
            address,
            token: Token::from(token.as_str()),
            run,
            bind: bind(lookup)?,
        })
    }

    /// The configuration of this member; devices, versions and times are the caller's to add.
    pub fn join_config(&self) -> JoinConfig {
        JoinConfig { bind: self.bind.clone(), ..JoinConfig::new(self.rank, self.size) }
    }

    /// Where the job meets.
    ///
    /// # Errors
    ///
    /// The address is an id that does not read.
    pub fn rendezvous(&self) -> Result<Rendezvous, EnvironmentError> {
        let Some(address) = &self.address else { return Ok(Rendezvous::Meeting(crate::Meeting::new())) };
        let (token, run) = (self.token.clone(), self.run.clone());
        if let Some(path) = address.strip_prefix("file:") {
            return Ok(Rendezvous::file(path, run));
        }
        if let Some(id) = address.strip_prefix("id:") {
            let id = id.parse().map_err(|reason| EnvironmentError::BadId { variable: ADDRESS, reason })?;
            return Ok(Rendezvous::Id(id));
        }
        Ok(Rendezvous::tcp(address.clone(), token, run))
    }
}

impl Group {
    /// Joins the group that the environment of this process names.
    ///
    /// # Errors
    ///
    /// As [`Group::join`], and [`JoinError::Environment`] if no launcher's variables are there or two disagree.
    pub fn from_environment(deadline: impl Into<Deadline>) -> Result<Self, JoinError> {
        let environment = Environment::of_process()?;
        Self::join(environment.rendezvous()?, environment.join_config(), deadline)
    }
}

/// A number, and the variable that it is from.
#[derive(Debug, Clone, Copy)]
struct Number {
    variable: &'static str,
    value: u32,
}

#[derive(Debug)]
struct Role {
    family: Family,
    rank: Number,
    size: Number,
    local_rank: Option<Number>,
    local_size: Option<Number>,
}

impl Role {
    fn read(names: &Names, lookup: &Lookup<'_>) -> Result<Option<Self>, EnvironmentError> {
        if names.mark.is_some_and(|mark| lookup(mark).is_none()) {
            return Ok(None);
        }
        let (rank, size) = (number(names.rank, lookup)?, number(names.size, lookup)?);
        let (rank, size) = match (rank, size) {
            (Some(rank), Some(size)) => (rank, size),
            // Ours are set on purpose; the others' names are common enough to be there by accident.
            (Some(_), None) if names.family == Family::Warpweft => {
                return Err(incomplete(names.rank, names.size));
            }
            (None, Some(_)) if names.family == Family::Warpweft => {
                return Err(incomplete(names.size, names.rank));
            }
            _ => return Ok(None),
        };
        if rank.value >= size.value {
            return Err(EnvironmentError::OutOfRange {
                rank: (rank.variable, rank.value),
                size: (size.variable, size.value),
            });
        }
        let local_rank = number(names.local_rank, lookup)?;
        let local_size = match names.family {
            // Slurm says how many were asked for on each host, and a host may have got fewer.
            Family::Slurm if lookup("SLURM_JOB_NUM_NODES").as_deref() != Some("1") => None,
            _ => number(names.local_size, lookup)?,
        };
        Ok(Some(Self { family: names.family, rank, size, local_rank, local_size }))
    }

    fn compare(&self, other: &Self) -> Result<(), EnvironmentError> {
        let pairs = [
            (Some(self.rank), Some(other.rank)),
            (Some(self.size), Some(other.size)),
            (self.local_rank, other.local_rank),
            (self.local_size, other.local_size),
        ];
        for (first, second) in pairs.into_iter().filter_map(|(first, second)| first.zip(second)) {
            if first.value != second.value {
                return Err(EnvironmentError::Conflict {
                    first: (first.variable, first.value),
                    second: (second.variable, second.value),
                });
            }
        }
        Ok(())
    }
}

fn number(variable: &'static str, lookup: &Lookup<'_>) -> Result<Option<Number>, EnvironmentError> {
    let Some(text) = lookup(variable) else { return Ok(None) };
    // `parse` takes a sign, which no launcher writes.
    let digits = text.trim();
    let value = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
    let value = value.ok_or(EnvironmentError::BadValue { variable, value: text })?;
    Ok(Some(Number { variable, value }))
}

fn chosen(lookup: &Lookup<'_>) -> Result<Option<Family>, EnvironmentError> {
    let Some(value) = lookup(CHOICE) else { return Ok(None) };
    let family = FAMILIES.iter().find(|names| names.choice == value);
    family.map(|names| Some(names.family)).ok_or(EnvironmentError::BadValue { variable: CHOICE, value })
}

fn incomplete(present: &'static str, missing: &'static str) -> EnvironmentError {
    EnvironmentError::Incomplete { present, missing }
}

/// Why no family counts: one of two variables alone, or none at all.
fn nobody(lookup: &Lookup<'_>, chosen: Option<Family>) -> EnvironmentError {
    for names in FAMILIES.iter().filter(|names| chosen.is_none_or(|family| family == names.family)) {
        match (lookup(names.rank).is_some(), lookup(names.size).is_some()) {
            (true, false) => return incomplete(names.rank, names.size),
            (false, true) => return incomplete(names.size, names.rank),
            _ => {}
        }
    }
    EnvironmentError::NoLauncher
}

/// What tells one run of a job from another.
fn run(family: Family, lookup: &Lookup<'_>) -> RunId {
    let parts: &[&str] = match family {
        Family::Warpweft => &[],
        Family::Torchrun => &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
        Family::Slurm => &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
        Family::OpenMpi => &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        Family::Pmi => &["PMI_JOBID", "I_MPI_JOB_ID"],
    };
    if let Some(run) = lookup(RUN) {
        return RunId::from(run.as_str());
    }
    let parts: Vec<String> = parts.iter().filter_map(|name| lookup(name)).collect();
    RunId::from(parts.join(".").as_str())
}

fn address(
    family: Family,
    is_local: bool,
    run: &RunId,
    lookup: &Lookup<'_>,
) -> Result<String, EnvironmentError> {
    let host = lookup("MASTER_ADDR");
    let port = match lookup("MASTER_PORT") {
        Some(text) => match text.trim().parse::<u16>() {
            Ok(port) if port > 0 => Some(port),
            _ => return Err(EnvironmentError::BadValue { variable: "MASTER_PORT", value: text }),
        },
        None => None,
    };
    match family {
        Family::Torchrun => {
            let host = host.ok_or_else(|| incomplete("RANK", "MASTER_ADDR"))?;
            Ok(at(&host, torch_port(port.unwrap_or(TORCH_PORT), lookup), is_local))
        }
        Family::Slurm => {
            let port = port.unwrap_or_else(|| derived_port(slurm_number(lookup)));
            Ok(at(&host.map_or_else(|| first_host(lookup), Ok)?, port, is_local))
        }
        Family::Warpweft | Family::OpenMpi | Family::Pmi => match (host, port) {
            (Some(host), Some(port)) => Ok(at(&host, port, is_local)),
            // The others of this host derive the same port from the same name.
            (None, None) if is_local && !run.as_str().is_empty() && family != Family::Warpweft => {
                Ok(at("127.0.0.1", derived_port(name_number(run)), true))
            }
            (None, None) if family == Family::OpenMpi => head_of_open_mpi(lookup),
            _ => Err(EnvironmentError::NoAddress { family }),
        },
    }
}

/// A job that is on this host alone meets on the loopback interface, whatever this host is called.
fn at(host: &str, port: u16, is_local: bool) -> String {
    let host = if is_local { "127.0.0.1" } else { host };
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// torchrun's agent holds the port itself, so the next one is taken.
fn torch_port(port: u16, lookup: &Lookup<'_>) -> u16 {
    let agent_holds_it =
        lookup("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|it| it.eq_ignore_ascii_case("true"));
    if agent_holds_it { port.checked_add(1).unwrap_or(port - 1) } else { port }
}

fn slurm_number(lookup: &Lookup<'_>) -> u64 {
    let number = |name: &str| lookup(name).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
    // Steps of one job run side by side.
    number("SLURM_JOB_ID").wrapping_add(number("SLURM_STEP_ID"))
}

fn name_number(run: &RunId) -> u64 {
    let hash = blake3::hash(run.as_str().as_bytes());
    hash.as_bytes()[..8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn derived_port(number: u64) -> u16 {
    let (first, count) = DERIVED_PORTS;
    first + u16::try_from(number % count).expect("the remainder is below 4096")
}

fn first_host(lookup: &Lookup<'_>) -> Result<String, EnvironmentError> {
    for variable in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        if let Some(value) = lookup(variable) {
            let hosts = expand_host_list(&value);
            let first = hosts.and_then(|hosts| hosts.into_iter().next());
            return first.ok_or(EnvironmentError::BadValue { variable, value });
        }
    }
    Err(incomplete("SLURM_JOB_ID", "SLURM_STEP_NODELIST"))
}

/// `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`: the head's addresses, of which the first counts.
fn head_of_open_mpi(lookup: &Lookup<'_>) -> Result<String, EnvironmentError> {
    const VARIABLE: &str = "OMPI_MCA_orte_hnp_uri";
    let Some(value) = lookup(VARIABLE) else {
        return Err(EnvironmentError::NoAddress { family: Family::OpenMpi });
    };
    let head = value.trim_matches('"').split_once(';').and_then(|(job, uri)| {
        let job: u64 = job.split('.').next()?.parse().ok()?;
        let hosts = uri.strip_prefix("tcp://").or_else(|| uri.strip_prefix("tcp6://"))?.rsplit_once(':')?.0;
        let host = hosts.trim_matches(['[', ']']).split(',').next().filter(|host| !host.is_empty())?;
        Some(at(host, derived_port(job), false))
    });
    head.ok_or(EnvironmentError::BadValue { variable: VARIABLE, value })
}

fn bind(lookup: &Lookup<'_>) -> Result<Bind, EnvironmentError> {
    let Some(value) = lookup(BIND) else { return Ok(Bind::Loopback) };
    match value.as_str() {
        "loopback" => Ok(Bind::Loopback),
        "any" => Ok(Bind::Any),
        _ => match value.strip_prefix("interface:") {
            Some(name) if !name.is_empty() => Ok(Bind::Interface(name.to_owned())),
            _ => Err(EnvironmentError::BadValue { variable: BIND, value }),
        },
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Warpweft => "warpweft",
            Self::Torchrun => "torchrun",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
        })
    }
}

/// Why the environment does not say who this process is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// No launcher's variables are there.
    #[error(
        "no launcher has said who this process is: there is no WARPWEFT_RANK, RANK, SLURM_PROCID, \
         OMPI_COMM_WORLD_RANK or PMI_RANK"
    )]
    NoLauncher,
    /// Two variables say different things.
    #[error(
        "{} is {} and {} is {}: unset one, or say which launcher counts with WARPWEFT_ENVIRONMENT",
        .first.0, .first.1, .second.0, .second.1
    )]
    Conflict {
        /// A variable and its value.
        first: (&'static str, u32),
        /// The other.
        second: (&'static str, u32),
    },
    /// A variable is there without the one that belongs to it.
    #[error("{present} is set and {missing} is not")]
    Incomplete {
        /// What is there.
        present: &'static str,
        /// What is not.
        missing: &'static str,
    },
    /// A variable does not read.
    #[error("{variable} is {value:?}, which it cannot be")]
    BadValue {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// An id does not read.
    #[error("{variable} has {reason}")]
    BadId {
        /// The variable.
        variable: &'static str,
        /// What is wrong.
        reason: ParseUniqueIdError,
    },
    /// The rank is none of the group.
    #[error("{} is {} and {} is {}: ranks are below it", .rank.0, .rank.1, .size.0, .size.1)]
    OutOfRange {
        /// The rank's variable and value.
        rank: (&'static str, u32),
        /// The size's.
        size: (&'static str, u32),
    },
    /// Nothing says where rank 0 is.
    #[error("{family} does not say where rank 0 is: set WARPWEFT_ADDRESS, or MASTER_ADDR and MASTER_PORT")]
    NoAddress {
        /// Whose variables count.
        family: Family,
    },
}

impl EnvironmentError {
    /// How to react: always by mending the environment.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::Usage
    }
}
