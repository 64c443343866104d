//! How ranks come to the same memory.

use std::{
    collections::BTreeMap,
    process,
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic},
    thread,
};

use serde::{Deserialize, Serialize};
use warpweft_bootstrap::{Group, Rank};
use warpweft_core_types::Deadline;

use crate::{
    HostConfig, HostError,
    fabric::{Fabric, LookCount},
    layout::Layout,
    region::Region,
};

/// The name of the calls to the group.
const NAME: &str = "host collectives";

/// What a rank says of itself.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Introduction {
    /// Names its process: threads of one say the same, and nobody else.
    process: ([u8; 16], u32),
    config: HostConfig,
}

pub(crate) fn join(group: &Arc<Group>, config: &HostConfig, deadline: Deadline) -> Result<Fabric, HostError> {
    let own = Introduction { process: this_process()?, config: *config };
    let bytes = postcard::to_stdvec(&own).expect("plain values are always written");
    let all = group.all_gather(NAME, &bytes, deadline)?;
    let all: Vec<Option<Introduction>> = all.iter().map(|bytes| postcard::from_bytes(bytes).ok()).collect();
    // All ranks see the same, so that all come to the same answer.
    check(group, &all)?;
    let is_process = |other: &Option<Introduction>| other.as_ref().map(|other| other.process);
    let is_one_process = all.iter().all(|other| is_process(other) == is_process(&all[0]));
    let layout = Layout::new(group.size(), config);
    let (region, said) = if is_one_process {
        share_within(group, layout, deadline)?
    } else {
        share_between(group, layout, deadline)
    };
    let text = region.as_ref().err().map(describe);
    group.confirm(NAME, text.as_deref().map_or(Ok(()), Err), deadline).map_err(HostError::from).or_else(
        |error| {
            // What failed here says more than that it failed.
            if text.is_some() { Ok(()) } else { Err(error) }
        },
    )?;
    drop(said);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let is_crowded = group.size() as usize > cores;
    Ok(Fabric {
        region: region?,
        rank: group.rank().0,
        size: group.size(),
        config: *config,
        is_one_process,
        is_crowded,
        looks: LookCount::new(is_crowded),
        group: Arc::clone(group),
        said: Mutex::new(false),
    })
}

fn describe(error: &HostError) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

fn check(group: &Group, all: &[Option<Introduction>]) -> Result<(), HostError> {
    let members = group.members();
    if let Some(member) = members.iter().find(|member| !member.shares_host(&members[0])) {
        return Err(HostError::OtherHost { rank: member.rank.0, host: member.host_name.clone() });
    }
    let config = |other: &Option<Introduction>| other.as_ref().map(|other| other.config);
    let differs = |other: &&Option<Introduction>| other.is_none() || config(other) != config(&all[0]);
    match all.iter().position(|other| differs(&other)) {
        Some(rank) => Err(HostError::OtherConfig { rank: u32::try_from(rank).unwrap_or(u32::MAX) }),
        None => Ok(()),
    }
}

/// Random bytes that this process made once, and its number: a fork has the same bytes.
fn this_process() -> Result<([u8; 16], u32), HostError> {
    static BYTES: OnceLock<[u8; 16]> = OnceLock::new();

    let mut made = [0; 16];
    getrandom::fill(&mut made)
        .map_err(|error| HostError::Memory { what: "random bytes", source: std::io::Error::other(error) })?;
    Ok((*BYTES.get_or_init(|| made), process::id()))
}

/// Memory on its way from rank 0 to the other ranks of its process, by a number.
static WAITING: Mutex<BTreeMap<u64, Arc<Region>>> = Mutex::new(BTreeMap::new());

/// Takes what rank 0 made out of the list, once all have it.
struct Said(Option<u64>);

impl Drop for Said {
    fn drop(&mut self) {
        if let Some(number) = self.0 {
            waiting().remove(&number);
        }
    }
}

fn waiting() -> std::sync::MutexGuard<'static, BTreeMap<u64, Arc<Region>>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

type Shared = (Result<Arc<Region>, HostError>, Said);

fn share_within(group: &Group, layout: Layout, deadline: Deadline) -> Result<Shared, HostError> {
    static NEXT: atomic::AtomicU64 = atomic::AtomicU64::new(0);

    let mut said = Said(None);
    let mut own = None;
    if group.rank() == Rank(0) {
        let region = Region::of_process(layout).map(Arc::new);
        if let Ok(region) = &region {
            // Numbers differ, and that is all that matters.
            let number = NEXT.fetch_add(1, atomic::Ordering::Relaxed);
            waiting().insert(number, Arc::clone(region));
            said.0 = Some(number);
        }
        own = Some(region);
    }
    let number = said.0.map_or_else(Vec::new, |number| number.to_le_bytes().to_vec());
    let number = group.broadcast(NAME, Rank(0), &number, deadline)?;
    if let Some(own) = own {
        return Ok((own, said));
    }
    let number = number.try_into().ok().map(u64::from_le_bytes);
    let region = number.and_then(|number| waiting().get(&number).cloned());
    let region = region.ok_or_else(|| HostError::Unexpected("nothing".into()));
    Ok((region, said))
}

#[cfg(target_os = "linux")]
fn share_between(group: &Group, layout: Layout, deadline: Deadline) -> Shared {
    use std::os::fd::AsFd as _;

    let lead = || {
        let (region, file) = Region::of_file(layout)?;
        for rank in 1..group.size() {
            group.send_descriptors(Rank(rank), &[file.as_fd()], NAME.as_bytes(), deadline)?;
        }
        Ok(region)
    };
    let follow = || {
        let parcel = group.receive_descriptors(Rank(0), deadline)?;
        let [file] = parcel.descriptors.as_slice() else {
            return Err(HostError::Unexpected(format!("{} descriptors", parcel.descriptors.len())));
        };
        if parcel.bytes != NAME.as_bytes() {
            return Err(HostError::Unexpected(String::from_utf8_lossy(&parcel.bytes).into_owned()));
        }
        Region::from_file(file, layout)
    };
    let region: Result<Region, HostError> = if group.rank() == Rank(0) { lead() } else { follow() };
    (region.map(Arc::new), Said(None))
}

#[cfg(not(target_os = "linux"))]
fn share_between(_: &Group, _: Layout, _: Deadline) -> Shared {
    let source = std::io::ErrorKind::Unsupported.into();
    (Err(HostError::Memory { what: "memory of several processes", source }), Said(None))
}
