//! A member that does what it is told, a line at a time, and says what came of it.

use std::{
    io::{BufRead as _, Read as _, Seek as _, Write as _},
    os::fd::AsFd as _,
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};
use warpweft_bootstrap::{Group, GroupError, Health, JoinConfig, PulseConfig, Rank, Rendezvous, Successor};
use warpweft_core_types::DeviceUuid;

/// Nanoseconds of a clock that all processes of a host share.
pub(crate) fn clock_ns() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap()).as_nanos()
}

pub(crate) const CLOSELY: PulseConfig = PulseConfig {
    interval: Duration::from_millis(25),
    suspect_after: Duration::from_millis(150),
    lost_after: Duration::from_millis(600),
};

pub(crate) fn say(words: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{words}").unwrap();
    out.flush().unwrap();
}

/// `rank size address token run milliseconds [device]`, then lines of what to do.
pub(crate) fn run(words: &[String]) {
    let mut stage = Stage::default();
    let joined = match words[0].as_str() {
        "rejoin" => rejoin(words),
        _ => join(words),
    };
    match joined {
        Ok(group) => {
            say(format_args!("joined {} {} {}", group.rank(), group.size(), group.epoch()));
            stage.groups.push(group);
        }
        Err(error) => say(format_args!("failed {error:?}")),
    }
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        stage.perform(&words);
    }
}

fn join(words: &[String]) -> Result<Group, warpweft_bootstrap::JoinError> {
    let [rank, size, address, token, run, within, rest @ ..] = words else { panic!("{words:?}") };
    let config = JoinConfig::new(Rank(rank.parse().unwrap()), size.parse().unwrap());
    let devices: Vec<DeviceUuid> = rest.iter().map(|device| device.parse().unwrap()).collect();
    let config = JoinConfig { pulse: CLOSELY, devices, ..config };
    let rendezvous = match address.strip_prefix("file:") {
        Some(path) => Rendezvous::file(path, run.as_str().into()),
        None => Rendezvous::tcp(address.as_str(), token.as_str().into(), run.as_str().into()),
    };
    Group::join(rendezvous, config, Duration::from_millis(within.parse().unwrap()))
}

fn rejoin(words: &[String]) -> Result<Group, warpweft_bootstrap::JoinError> {
    let [_, address, epoch, token, run, within] = words else { panic!("{words:?}") };
    let successor = Successor {
        address: address.parse().unwrap(),
        epoch: epoch.parse().unwrap(),
        token: token.as_str().into(),
        run: run.as_str().into(),
    };
    let config = JoinConfig { pulse: CLOSELY, ..JoinConfig::new(Rank(0), 1) };
    Group::rejoin(&successor, config, Duration::from_millis(within.parse().unwrap()))
}

#[derive(Default)]
struct Stage {
    groups: Vec<Group>,
}

impl Stage {
    fn group(&self) -> &Group {
        self.groups.last().unwrap()
    }

    fn perform(&mut self, words: &[&str]) {
        let within = || Duration::from_millis(words.last().unwrap().parse().unwrap());
        match words[0] {
            "barrier" => match self.group().barrier(words[1], within()) {
                Ok(()) => say("ok"),
                Err(error) => say(format_args!("{error:?} at {}", clock_ns())),
            },
            "abort" => {
                self.group().abort(words[1]).unwrap();
                say("ok");
            }
            // `lost RANK MS`: when it was known.
            "lost" => {
                let rank: usize = words[1].parse().unwrap();
                match self.group().wait_health(within(), |health| !health[rank].is_present()) {
                    Ok(health) => say(format_args!("{:?} at {}", health[rank], clock_ns())),
                    Err(error) => say(format_args!("{error:?}")),
                }
            }
            "health" => {
                let rank: usize = words[1].parse().unwrap();
                let wanted = match words[2] {
                    "alive" => Health::Alive,
                    "stopped" => Health::Suspect { stopped: true },
                    other => panic!("{other}"),
                };
                match self.group().wait_health(within(), |health| health[rank] == wanted) {
                    Ok(_) => say("ok"),
                    Err(error) => say(format_args!("{error:?} {:?}", self.group().health())),
                }
            }
            "successor" => {
                let successor = self.group().successor().unwrap();
                say(format_args!("{} {}", successor.address, successor.epoch));
            }
            "reform" => self.reform(words[1].parse().unwrap(), within()),
            "send" => self.send(Rank(words[1].parse().unwrap()), within()),
            "receive" => self.receive(Rank(words[1].parse().unwrap()), within()),
            "fork" => self.fork(),
            "leave" => {
                self.groups.clear();
                say("ok");
            }
            "exit" => std::process::exit(0),
            other => panic!("{other}"),
        }
    }

    /// The new process tries everything, then keeps the sockets it has inherited until it is killed.
    fn fork(&mut self) {
        let child = crate::fork::fork_process();
        if child != 0 {
            return;
        }
        let group = self.groups.pop().unwrap();
        let second = Duration::from_secs(1);
        let errors = [
            group.barrier("x", second).unwrap_err(),
            group.abort("x").unwrap_err(),
            group.health().unwrap_err(),
            group.check().unwrap_err(),
            group.wait_health(second, |_| false).unwrap_err(),
            group.send_descriptors(Rank(0), &[], b"", second).unwrap_err(),
            group.receive_descriptors(Rank(0), second).unwrap_err(),
            group.watch().next(second).unwrap_err(),
            group.successor().unwrap_err(),
        ];
        let is_forked = |error: &GroupError| matches!(error, GroupError::Forked { .. });
        let reform = group.reform(second).is_err();
        let all = reform && errors.iter().all(is_forked);
        drop(group);
        say(format_args!("{} {}", if all { "forked" } else { "wrong" }, std::process::id()));
        loop {
            std::thread::park();
        }
    }

    fn reform(&mut self, newcomers: u32, within: Duration) {
        let config = warpweft_bootstrap::ReformConfig { newcomers, ..Default::default() };
        match self.group().reform_with(&config, within) {
            Ok(reformed) => {
                let ranks: Vec<String> = reformed
                    .ranks
                    .iter()
                    .map(|rank| rank.map_or("-".into(), |rank| rank.to_string()))
                    .collect();
                let group = &reformed.group;
                say(format_args!(
                    "joined {} {} {} [{}]",
                    group.rank(),
                    group.size(),
                    group.epoch(),
                    ranks.join(" ")
                ));
                self.groups = vec![reformed.group];
            }
            Err(error) => say(format_args!("failed {error:?}")),
        }
    }

    /// A file without a name, with this process's number in it.
    fn send(&self, to: Rank, within: Duration) {
        let mut file = tempfile::tempfile().unwrap();
        write!(file, "from {}", std::process::id()).unwrap();
        match self.group().send_descriptors(to, &[file.as_fd()], b"a file", within) {
            Ok(()) => say("ok"),
            Err(error) => say(format_args!("{error:?}")),
        }
    }

    fn receive(&self, from: Rank, within: Duration) {
        match self.group().receive_descriptors(from, within) {
            Ok(mut parcel) => {
                let mut file = std::fs::File::from(parcel.descriptors.pop().unwrap());
                file.rewind().unwrap();
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                say(format_args!("{} {text}", String::from_utf8(parcel.bytes).unwrap()));
            }
            Err(error) => say(format_args!("{error:?}")),
        }
    }
}
