//! The ranks: a thread for each device, or this process under a launcher.

use std::{sync::Arc, thread, time::Duration};

use anyhow::Context as _;
use warpweft::{
    Device, Features,
    bootstrap::{EnvironmentError, Group, Host, JoinConfig, JoinError, Meeting, Rank, Rendezvous, UniqueId},
};

use super::PerfCollective;
use crate::{output::WrongCall, select};

/// One rank, before it has a communicator.
pub(super) struct Place {
    /// For what ranks tell each other about the measurement.
    pub(super) control: Group,
    pub(super) device: Arc<dyn Device>,
    pub(super) timeout: Duration,
}

impl Place {
    pub(super) fn is_first(&self) -> bool {
        self.control.rank() == Rank(0)
    }

    /// Another group of the same ranks.
    pub(super) fn group(&self) -> anyhow::Result<Group> {
        let host = self.is_first().then(|| Host::new(self.control.bind())).transpose()?;
        let id = host.as_ref().map(|host| host.id().as_bytes().to_vec()).unwrap_or_default();
        let id = self.control.broadcast("id of a group", Rank(0), &id, self.timeout)?;
        let rendezvous = match host {
            Some(host) => Rendezvous::Hosting(host),
            None => Rendezvous::Id(UniqueId::from_bytes(&id)?),
        };
        let config = JoinConfig::new(self.control.rank(), self.control.size());
        let config = JoinConfig { bind: self.control.bind().clone(), ..config };
        Ok(Group::join(rendezvous, config, self.timeout)?)
    }
}

/// Has every rank do the job; what rank 0 made of it, if it is here.
pub(super) fn run<T: Send>(
    args: &PerfCollective,
    job: impl Fn(&Place) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Option<T>> {
    let devices = devices(args)?;
    let control = match Group::from_environment(args.timeout) {
        Err(JoinError::Environment(EnvironmentError::NoLauncher)) => {
            return Ok(Some(in_threads(args, &devices, &job)?));
        }
        joined => joined.context("the ranks did not meet")?,
    };
    let own = control.members()[control.rank().index()].host;
    let before = control.members().iter().take_while(|member| member.rank != control.rank());
    let local = before.filter(|member| member.host == own).count();
    let device = devices.get(local).with_context(|| {
        format!("rank {} is number {local} on its host, which has {} devices", control.rank(), devices.len())
    })?;
    let place = Place { control, device: Arc::clone(device), timeout: args.timeout };
    let made = job(&place)?;
    // Nobody leaves while others still measure.
    place.control.barrier("end", args.timeout)?;
    Ok(place.is_first().then_some(made))
}

fn devices(args: &PerfCollective) -> anyhow::Result<Vec<Arc<dyn Device>>> {
    let mut devices = Vec::new();
    for backend in select::backends(&args.selection)? {
        let count = u32::try_from(backend.devices()?.len())?;
        for ordinal in 0..count {
            devices.push(backend.open(ordinal, Features::empty())?);
        }
    }
    if devices.is_empty() {
        return Err(WrongCall("these backends have no devices here".to_owned()).into());
    }
    Ok(devices)
}

fn in_threads<T: Send>(
    args: &PerfCollective,
    devices: &[Arc<dyn Device>],
    job: &(impl Fn(&Place) -> anyhow::Result<T> + Sync),
) -> anyhow::Result<T> {
    let (meeting, size) = (Meeting::new(), u32::try_from(devices.len())?);
    let rank = |rank: u32, device: &Arc<dyn Device>| -> anyhow::Result<T> {
        let config = JoinConfig::new(Rank(rank), size);
        let control = Group::join(Rendezvous::Meeting(Arc::clone(&meeting)), config, args.timeout)?;
        let place = Place { control, device: Arc::clone(device), timeout: args.timeout };
        let made = job(&place)?;
        place.control.barrier("end", args.timeout)?;
        Ok(made)
    };
    thread::scope(|scope| {
        let rank = &rank;
        let start = |(number, device)| scope.spawn(move || rank(number, device));
        let threads: Vec<_> = (0..size).zip(devices).map(start).collect();
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?);
        // The first error is what ended the others.
        ended.collect::<anyhow::Result<Vec<_>>>()?.into_iter().next().context("there are ranks")
    })
}
