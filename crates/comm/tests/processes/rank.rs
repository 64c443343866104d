//! A rank that does what it is told, a line at a time, and says what came of it.
//!
//! Sums go on in a thread of their own, so that it can be told more while it is inside a call.

use std::{
    io::{BufRead as _, Write as _},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use warpweft_bootstrap::{
    Group, Health, JoinConfig, PulseConfig, Rank, ReformConfig, Rendezvous, RunId, Successor,
};
use warpweft_comm::{CommConfig, CommError, Communicator, Enqueued, FlightConfig};
use warpweft_core_types::{
    Backend as _, BufferDesc, BufferView, CollectiveFailure, DType, Device, Failure, Features, Queue,
    QueueDesc, ReduceOp,
};
use warpweft_host::HostBackend;

/// Only a hang takes as long.
const WITHIN: Duration = Duration::from_secs(60);

/// One that is stopped is noticed soon, and never taken for dead.
const CLOSELY: PulseConfig = PulseConfig {
    interval: Duration::from_millis(25),
    suspect_after: Duration::from_millis(150),
    lost_after: Duration::from_millis(600),
};

fn say(words: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{words}").unwrap();
    out.flush().unwrap();
}

/// `first RANK SIZE FOLDER` or `again ADDRESS EPOCH TOKEN RUN`, then lines of what to do.
pub(crate) fn run(words: &[String]) {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut flight = FlightConfig::default();
    let group = match words[..] {
        ["first", rank, size, folder] => {
            flight.folder = Some(folder.into());
            let rendezvous = Rendezvous::file(format!("{folder}/rendezvous"), RunId::from("run"));
            let config = JoinConfig::new(Rank(rank.parse().unwrap()), size.parse().unwrap());
            Group::join(rendezvous, JoinConfig { pulse: CLOSELY, ..config }, WITHIN)
        }
        ["again", address, epoch, token, run] => {
            let (address, epoch) = (address.parse().unwrap(), epoch.parse().unwrap());
            let successor = Successor { address, epoch, token: token.into(), run: run.into() };
            let config = JoinConfig { pulse: CLOSELY, ..JoinConfig::new(Rank(0), 1) };
            Group::rejoin(&successor, config, WITHIN)
        }
        _ => panic!("{words:?}"),
    };
    let device = HostBackend::with_devices(1).unwrap().open(0, Features::empty()).unwrap();
    let config = CommConfig { flight, ..CommConfig::default() };
    let comm = Communicator::create(group.unwrap(), &device, &config, WITHIN).unwrap();
    let mut place = Place::new(comm, device);
    for line in std::io::stdin().lock().lines() {
        place.perform(&line.unwrap().split(' ').collect::<Vec<_>>());
    }
}

struct Place {
    comm: Arc<Communicator>,
    device: Arc<dyn Device>,
    sums: Option<JoinHandle<Result<(), CommError>>>,
    enough: Arc<AtomicBool>,
}

impl Place {
    fn new(comm: Communicator, device: Arc<dyn Device>) -> Self {
        let engine = comm.engines().next().unwrap();
        say(format_args!("rank {} of {} by {engine}", comm.rank(), comm.world_size()));
        Self { comm: Arc::new(comm), device, sums: None, enough: Arc::default() }
    }

    fn perform(&mut self, words: &[&str]) {
        match *words {
            // Sums without end, of so many words; the answer comes once they are well under way.
            ["sums", how, count] => self.start(how == "queue", count.parse().unwrap()),
            // As long as any rank has not said that it is enough.
            ["enough"] => self.enough.store(true, Ordering::Relaxed),
            ["ended"] => self.ended(),
            ["shrink"] => self.reform(0),
            ["reform", newcomers] => self.reform(newcomers.parse().unwrap()),
            ["successor"] => {
                let Successor { address, epoch, token, run } = self.comm.group().successor().unwrap();
                say(format_args!("{address} {epoch} {} {run}", token.reveal()));
            }
            ["abort", reason] => {
                self.comm.abort(reason).unwrap();
                say("aborted");
            }
            ["health", rank, wanted] => self.wait_health(rank.parse().unwrap(), wanted),
            ["barrier"] => say(told(&self.comm, &self.comm.barrier(WITHIN))),
            _ => panic!("{words:?}"),
        }
    }

    fn start(&mut self, in_queue: bool, count: usize) {
        self.enough = Arc::default();
        let (comm, enough) = (Arc::clone(&self.comm), Arc::clone(&self.enough));
        let work = Work::new(&self.device, count);
        self.sums = Some(thread::spawn(move || work.go(&comm, in_queue, &enough)));
    }

    fn ended(&mut self) {
        let outcome = self.sums.take().unwrap().join().unwrap();
        say(told(&self.comm, &outcome));
    }

    fn reform(&mut self, newcomers: u32) {
        let config = ReformConfig { newcomers, ..ReformConfig::default() };
        let comm = self.comm.reform(&config, WITHIN).unwrap();
        *self = Self::new(comm, Arc::clone(&self.device));
    }

    fn wait_health(&self, rank: usize, wanted: &str) {
        let wanted = match wanted {
            "alive" => Health::Alive,
            "stopped" => Health::Suspect { stopped: true },
            other => panic!("{other}"),
        };
        match self.comm.group().wait_health(WITHIN, |health| health[rank] == wanted) {
            Ok(_) => say("ok"),
            Err(error) => say(format_args!("{error:?}")),
        }
    }
}

/// What became of a call, and what the communicator says of itself then.
fn told(comm: &Communicator, outcome: &Result<(), CommError>) -> String {
    let Err(error) = outcome else { return "right".into() };
    let what = match error {
        CommError::Failed(failure) => match &**failure {
            Failure::Collective(CollectiveFailure::PeerLost { rank, .. }) => format!("lost {rank}"),
            Failure::Collective(CollectiveFailure::Aborted { rank, reason }) => {
                format!("aborted by {rank}, {reason}")
            }
            other => other.to_string(),
        },
        other => format!("{other:?}"),
    };
    let is_healthy = if comm.is_healthy() { "healthy" } else { "not healthy" };
    format!("{:?}: {what}; {is_healthy}", error.class())
}

/// Two sums at a time: the next is in the queue before the last is over.
struct Work {
    queue: Arc<dyn Queue>,
    views: [BufferView; 2],
}

impl Work {
    fn new(device: &Arc<dyn Device>, count: usize) -> Self {
        let view = || {
            let buffer = device.allocate(&BufferDesc::host_visible(count as u64 * 4)).unwrap();
            BufferView::whole(buffer)
        };
        Self { queue: device.create_queue(&QueueDesc::default()).unwrap(), views: [view(), view()] }
    }

    /// Sums until a rank has had enough, which all see in the same sum.
    fn go(&self, comm: &Communicator, in_queue: bool, enough: &AtomicBool) -> Result<(), CommError> {
        let mut before: Option<(u32, Enqueued)> = None;
        for round in 0.. {
            let view = &self.views[round as usize % 2];
            fill(view, comm.rank(), round, enough.load(Ordering::Relaxed));
            let call = comm.all_reduce(ReduceOp::Sum, DType::U32, view, view)?;
            let mut is_last = false;
            if in_queue {
                let after = call.on(&self.queue)?;
                if let Some((round, call)) = before.replace((round, after)) {
                    call.wait(WITHIN)?;
                    is_last = self.check(comm, round);
                }
            } else {
                call.wait(WITHIN)?;
                is_last = self.check(comm, round);
            }
            if round == 9 {
                say("sums");
            }
            if is_last {
                break;
            }
        }
        before.map_or(Ok(()), |(_, call)| call.wait(WITHIN))
    }

    /// Whether it was the last; the words have to be right.
    fn check(&self, comm: &Communicator, round: u32) -> bool {
        let view = &self.views[round as usize % 2];
        let mut bytes = vec![0; usize::try_from(view.size()).unwrap()];
        view.read(&mut bytes).unwrap();
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        // A part of many words: reading all of them would be most of a round.
        let places = (1..words.len()).step_by(words.len().div_ceil(5000));
        let wrong =
            places.map(|place| (u32::try_from(place).unwrap(), words[place])).find(|(place, word)| {
                let all = (0..comm.world_size()).map(|rank| value(rank, round, *place));
                *word != all.fold(0, u32::wrapping_add)
            });
        assert_eq!(wrong, None, "round {round}");
        words[0] > 0
    }
}

/// Every word is another; the first says whether this rank has had enough.
fn fill(view: &BufferView, rank: u32, round: u32, enough: bool) {
    let count = u32::try_from(view.size() / 4).unwrap();
    let words = std::iter::once(enough.into()).chain((1..count).map(|place| value(rank, round, place)));
    view.write(&words.flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
}

const fn value(rank: u32, round: u32, place: u32) -> u32 {
    place.wrapping_mul(7) ^ rank.wrapping_mul(1000) ^ round
}
