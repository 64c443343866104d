//! How the ranks of a communicator find out what serves them all.

use std::{collections::HashMap, sync::Arc};

use serde::{Deserialize, Serialize};
use warpweft_bootstrap::{Group, MemberInfo, Rank};
use warpweft_core_types::{
    CollectiveError, Deadline, Device, DeviceKind, DeviceUuid, NativeCommunicatorDesc, NativeId,
};

#[cfg(unix)]
use crate::engine::low_latency::{LowLatencyEngine, SOURCE};
use crate::{
    CommConfig, CommError, EngineKind,
    config::Agreed,
    engine::{
        Engine,
        host::HostEngine,
        native::NativeEngine,
        planned::{BoardId, PlannedEngine},
        solo::SoloEngine,
    },
};

#[cfg(not(unix))]
const SOURCE: &str = "";

/// Ranks whose devices reach each other by kernels of our own at most, as many as those have bits for.
pub(crate) const MOST_RANKS: u32 = 16;

/// The backend of devices that are processor cores of the host.
const HOST: &str = "host";

/// What a rank tells the others of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    backend: String,
    uuid: [u8; 16],
    is_cpu: bool,
    /// The library of its own collectives, or why it has none.
    native: Result<String, String>,
    /// Why it has no kernels that reach other devices, if so.
    low_latency: Result<(), String>,
    /// The version of the driver, and what the device is linked to: what was measured holds for that.
    driver: String,
    links: String,
    agreed: Agreed,
    /// A number that was drawn; that of rank 0 tells communicators apart.
    mark: u32,
}

impl Facts {
    fn of(device: &dyn Device, size: u32, config: &CommConfig, mark: u32) -> Self {
        let info = device.info();
        let native = match device.collectives() {
            // Nothing is loaded for what copies do.
            _ if size == 1 => Err("one rank needs no library".to_owned()),
            None => Err(format!("{} has no collectives of its own", info.id)),
            Some(family) => family.library().map_err(|error| error.to_string()),
        };
        Self {
            backend: info.id.backend.to_owned(),
            uuid: *info.id.uuid.as_bytes(),
            is_cpu: info.kind == DeviceKind::Cpu,
            native,
            low_latency: refuses_low_latency(device),
            driver: info.driver.clone(),
            links: links_of(device),
            agreed: config.into(),
            mark,
        }
    }
}

#[cfg(unix)]
fn refuses_low_latency(device: &dyn Device) -> Result<(), String> {
    LowLatencyEngine::refuses(device)
}

#[cfg(not(unix))]
fn refuses_low_latency(device: &dyn Device) -> Result<(), String> {
    Err(format!("{} has no descriptors of memory on this system", device.info().id))
}

/// The links of a device, in the words that do not change from one run to the next.
fn links_of(device: &dyn Device) -> String {
    let facts = device.links().map(|links| links.facts()).unwrap_or_default();
    let mut links: Vec<String> = facts
        .iter()
        .map(|fact| format!("{:?} {:?} {} {}", fact.from, fact.to, fact.class, fact.link_count))
        .collect();
    links.sort();
    links.join(", ")
}

/// What the ranks of a communicator have found out.
pub(crate) struct Formed {
    /// A number that rank 0 has drawn.
    pub(crate) mark: u32,
    /// The engines that serve all ranks, the one to be asked first in front; the same on all ranks.
    pub(crate) engines: Vec<Arc<dyn Engine>>,
    /// All that decides how fast they are.
    pub(crate) key: String,
}

fn key_of(facts: &[Facts]) -> String {
    let ranks = facts.iter().map(|facts| {
        let Facts { backend, uuid, native, driver, links, .. } = facts;
        let uuid = DeviceUuid::from_bytes(*uuid);
        format!("{backend} {uuid}, driver {driver}, library {native:?}, links {links}\n")
    });
    let version = env!("CARGO_PKG_VERSION");
    let own = format!("version {version}, {:?}, kernels {:?}\n", facts[0].agreed, SOURCE.lines().nth(1));
    ranks.chain([own]).collect()
}

/// Finds out what serves all ranks.
pub(crate) fn engines(
    group: &Arc<Group>,
    device: &Arc<dyn Device>,
    config: &CommConfig,
    deadline: Deadline,
) -> Result<Formed, CommError> {
    let mark = u32::from_ne_bytes(random()?);
    let own = Facts::of(device.as_ref(), group.size(), config, mark);
    let facts = exchange(group, &own, deadline)?;
    check(group, &facts)?;
    let mut engines: Vec<Arc<dyn Engine>> = Vec::new();
    for kind in serving(group, &facts)? {
        let engine = match kind {
            EngineKind::Solo => Ok(Arc::new(SoloEngine) as Arc<dyn Engine>),
            EngineKind::Native => native(group, device, config, deadline),
            EngineKind::Host => host(group, device, config, deadline),
            EngineKind::Planned => planned(group, device, deadline),
            EngineKind::LowLatency => low_latency(group, device, config, deadline),
        };
        // All have it or none.
        let made = engine.as_ref().map(|_| ()).map_err(ToString::to_string);
        let confirmed = group.confirm(kind.name(), made.as_ref().copied().map_err(String::as_str), deadline);
        if kind == EngineKind::LowLatency
            && config.engine != Some(kind)
            && let Err(error) = &confirmed
        {
            // Nobody named it, and the others serve.
            tracing::info!(%error, "an engine is left out");
            continue;
        }
        engines.push(engine?);
        confirmed?;
    }
    // One that could not be made this time may be the best the next.
    let named = |engine: &Arc<dyn Engine>| format!("{} {}", engine.kind().name(), engine.variant());
    let kinds: Vec<String> = engines.iter().map(named).collect();
    let key = format!("{}engines {}\n", key_of(&facts), kinds.join(", "));
    Ok(Formed { mark: facts[0].mark, engines, key })
}

/// What nobody else draws.
fn random<const N: usize>() -> Result<[u8; N], CommError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| CommError::system("make random bytes")(error.into()))?;
    Ok(bytes)
}

fn exchange(group: &Group, own: &Facts, deadline: Deadline) -> Result<Vec<Facts>, CommError> {
    let bytes = postcard::to_allocvec(own).unwrap_or_default();
    let all = group.all_gather("devices of a communicator", &bytes, deadline)?;
    let read = |(rank, bytes): (Rank, &Vec<u8>)| {
        postcard::from_bytes(bytes).map_err(|error| CommError::NoEngine {
            reason: format!("rank {rank} tells of its device in a way that is not known here: {error}"),
        })
    };
    Rank::all(group.size()).zip(&all).map(read).collect()
}

/// Whether the ranks can belong together at all.
fn check(group: &Group, facts: &[Facts]) -> Result<(), CommError> {
    for (rank, other) in (0..).zip(facts) {
        if other.agreed != facts[0].agreed {
            return Err(CommError::Disagreement {
                ranks: [0, rank],
                what: "engine, timeout, validation, limits or tuning",
            });
        }
    }
    let mut seen = HashMap::new();
    for ((rank, facts), member) in (0..).zip(facts).zip(group.members()) {
        // Cores are shared by processes, and each has devices of its own made of them.
        let process = facts.is_cpu.then_some((member.host, member.pid));
        if let Some(first) = seen.insert((facts.uuid, process), rank) {
            return Err(CommError::DuplicateDevice {
                ranks: [first, rank],
                uuid: DeviceUuid::from_bytes(facts.uuid),
            });
        }
    }
    Ok(())
}

/// Which engines serve the ranks: those that were asked for, or all that can.
fn serving(group: &Group, facts: &[Facts]) -> Result<Vec<EngineKind>, CommError> {
    let judged = EngineKind::ALL.map(|kind| (kind, serves(kind, group, facts)));
    let wanted = facts[0].agreed.engine();
    // A part of one rank is nothing to most engines.
    let is_alone = |kind: &EngineKind| *kind == EngineKind::Solo && facts.len() == 1;
    let fits = |kind: &EngineKind| is_alone(kind) || wanted.is_none_or(|wanted| wanted == *kind);
    let mut serving: Vec<_> =
        judged.iter().filter(|(kind, serves)| fits(kind) && serves.is_ok()).map(|(kind, _)| *kind).collect();
    // What does everything needs no other behind it.
    if let Some(at) = serving.iter().position(|kind| *kind == EngineKind::Host) {
        serving.truncate(at + 1);
    }
    if serving.is_empty() {
        let reasons = judged.into_iter().filter(|(kind, _)| fits(kind));
        let reasons = reasons.filter_map(|(kind, serves)| Some(format!("{kind}: {}", serves.err()?)));
        return Err(CommError::NoEngine { reason: reasons.collect::<Vec<_>>().join("; ") });
    }
    Ok(serving)
}

/// Whether an engine serves these ranks, and why not.
fn serves(kind: EngineKind, group: &Group, facts: &[Facts]) -> Result<(), String> {
    let find = |wrong: &dyn Fn(&Facts) -> bool| facts.iter().position(wrong);
    match kind {
        EngineKind::Solo if facts.len() == 1 => Ok(()),
        EngineKind::Solo => Err(format!("there are {} ranks", facts.len())),
        EngineKind::Native => {
            if let Some(other) = find(&|other| other.backend != facts[0].backend) {
                let backends = [&facts[0].backend, &facts[other].backend];
                return Err(format!(
                    "rank 0 has a {} device and rank {other} a {} device",
                    backends[0], backends[1]
                ));
            }
            match facts
                .iter()
                .zip(0..)
                .find_map(|(facts, rank): (_, u32)| Some((rank, facts.native.as_ref().err()?)))
            {
                Some((rank, error)) => Err(format!("rank {rank}: {error}")),
                None => Ok(()),
            }
        }
        EngineKind::Host => {
            if let Some(rank) = find(&|facts| facts.backend != HOST) {
                return Err(format!("rank {rank} has a {} device", facts[rank].backend));
            }
            let members = group.members();
            match members.iter().find(|member| !member.shares_host(&members[0])) {
                Some(member) => Err(format!("rank {} is on another host", member.rank)),
                None => Ok(()),
            }
        }
        EngineKind::LowLatency => serves_low_latency(group, facts),
        EngineKind::Planned if facts.len() == 1 => Err("one rank needs no plan".to_owned()),
        EngineKind::Planned => {
            let (members, own) =
                (group.members(), |member: &MemberInfo| (member.host, member.pid_space, member.pid));
            match members.iter().find(|member| own(member) != own(&members[0])) {
                Some(member) => Err(format!("rank {} is in another process", member.rank)),
                None => Ok(()),
            }
        }
    }
}

/// It is for those who name it or have it measured.
fn serves_low_latency(group: &Group, facts: &[Facts]) -> Result<(), String> {
    if facts[0].agreed.engine() != Some(EngineKind::LowLatency) && !facts[0].agreed.is_tuned() {
        return Err("it is neither named nor measured".to_owned());
    }
    if !(2..=MOST_RANKS as usize).contains(&facts.len()) {
        return Err(format!("there are {} ranks, and 2 to {MOST_RANKS} fit", facts.len()));
    }
    if let Some((rank, reason)) =
        (0_u32..).zip(facts).find_map(|(rank, facts)| Some((rank, facts.low_latency.as_ref().err()?)))
    {
        return Err(format!("rank {rank}: {reason}"));
    }
    if let Some(rank) = facts.iter().position(|other| other.backend != facts[0].backend) {
        return Err(format!(
            "rank {rank} has a {} device, and rank 0 a {}",
            facts[rank].backend, facts[0].backend
        ));
    }
    let members = group.members();
    match members.iter().find(|member| !member.shares_host(&members[0])) {
        Some(member) => Err(format!("rank {} is on another host", member.rank)),
        None => Ok(()),
    }
}

#[cfg(unix)]
fn low_latency(
    group: &Group,
    device: &Arc<dyn Device>,
    config: &CommConfig,
    deadline: Deadline,
) -> Result<Arc<dyn Engine>, CommError> {
    // Early enough for the others to be told why.
    let deadline = Deadline::within(deadline.remaining().mul_f64(0.8));
    Ok(Arc::new(LowLatencyEngine::new(group, device, config, deadline)?))
}

#[cfg(not(unix))]
fn low_latency(
    _group: &Group,
    device: &Arc<dyn Device>,
    _config: &CommConfig,
    _deadline: Deadline,
) -> Result<Arc<dyn Engine>, CommError> {
    let reason = refuses_low_latency(device.as_ref()).err().unwrap_or_default();
    Err(CommError::NoEngine { reason })
}

fn host(
    group: &Arc<Group>,
    device: &Arc<dyn Device>,
    config: &CommConfig,
    deadline: Deadline,
) -> Result<Arc<dyn Engine>, CommError> {
    Ok(Arc::new(HostEngine::new(group, device, config.timeout, deadline)?))
}

fn planned(
    group: &Group,
    device: &Arc<dyn Device>,
    deadline: Deadline,
) -> Result<Arc<dyn Engine>, CommError> {
    let own: BoardId = if group.rank() == Rank(0) { random()? } else { BoardId::default() };
    let id = group.broadcast("board of a communicator", Rank(0), &own, deadline)?;
    let wrong = |_| CommError::NoEngine { reason: "rank 0 made no board".to_owned() };
    let id = BoardId::try_from(id).map_err(wrong)?;
    Ok(Arc::new(PlannedEngine::new(id, group.rank().0, group.size(), device)?))
}

/// The device's own collectives.
fn native(
    group: &Group,
    device: &Arc<dyn Device>,
    config: &CommConfig,
    deadline: Deadline,
) -> Result<Arc<dyn Engine>, CommError> {
    let missing =
        || CollectiveError::Unsupported { device: device.info().id, what: "collectives".to_owned() };
    let family = device.collectives().ok_or_else(missing)?;
    let (rank, size) = (group.rank().0, group.size());
    // Rank 0 says what went wrong by an id that is none.
    let made = if rank == 0 { family.create_id() } else { Ok(NativeId(Vec::new())) };
    let bytes = made.as_ref().map(|id| id.0.clone()).unwrap_or_default();
    let bytes = group.broadcast("id of a communicator", Rank(0), &bytes, deadline)?;
    made?;
    if bytes.is_empty() {
        return Err(CommError::NoEngine { reason: "rank 0 made no id".to_owned() });
    }
    let desc =
        NativeCommunicatorDesc { id: NativeId(bytes), rank, size, multiprocessors: config.multiprocessors };
    // Early enough for the others to be told why.
    let communicator = family.join(&desc, Deadline::within(deadline.remaining().mul_f64(0.8)))?;
    Ok(Arc::new(NativeEngine::new(Arc::clone(device), communicator)))
}
