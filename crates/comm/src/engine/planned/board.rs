//! Where the ranks of one process find each other's calls.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    BufferView, CollectiveCall, CollectiveFailure, CollectiveOp, DType, Device, Failure, SemaphorePoint,
};

use super::{
    gate::{Gate, Party, open_behind},
    round::Devices,
};
use crate::{CommError, inner::is_of_one};

/// By which ranks find their board.
pub(crate) type BoardId = [u8; 16];

/// The boards of this process.
static BOARDS: Mutex<BTreeMap<BoardId, Weak<Board>>> = Mutex::new(BTreeMap::new());

/// What the ranks of a communicator in one process share.
#[derive(Debug)]
pub(crate) struct Board {
    size: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    devices: Vec<Option<Arc<dyn Device>>>,
    /// What is shared by all rounds, once all have come.
    shared: Option<Arc<Devices>>,
    /// The number of each rank's next round.
    next: Vec<u64>,
    rounds: HashMap<u64, Vec<Option<Posted>>>,
    /// Sends without a receive, by sender and receiver, and receives without a send.
    sends: HashMap<(u32, u32), VecDeque<Posted>>,
    recvs: HashMap<(u32, u32), VecDeque<Posted>>,
    failure: Option<Arc<Failure>>,
}

/// What orders a group of calls on its rank.
#[derive(Debug, Clone)]
pub(crate) struct Post {
    /// Everything before the calls is over.
    pub(crate) ready: SemaphorePoint,
    /// What comes behind them.
    pub(crate) gate: Gate,
}

/// One call on the board.
#[derive(Debug, Clone)]
pub(crate) struct Posted {
    pub(crate) rank: u32,
    pub(crate) op: CollectiveOp,
    pub(crate) dtype: DType,
    pub(crate) src: Option<BufferView>,
    pub(crate) dst: Option<BufferView>,
    pub(crate) post: Post,
}

/// Calls that found each other.
enum Complete {
    /// One of each rank.
    Round(u64, Vec<Posted>),
    Pair(Box<[Posted; 2]>),
}

impl Posted {
    /// What all ranks have to call alike.
    fn matches(&self, other: &Self) -> bool {
        (self.op, self.dtype) == (other.op, other.dtype) && self.unit() == other.unit()
    }

    /// Bytes of the smaller operand, or the part of one rank.
    fn unit(&self) -> Option<u64> {
        let sizes = [&self.src, &self.dst].into_iter().flatten().map(BufferView::size);
        sizes.min()
    }

    fn party(&self) -> Party {
        Party { rank: self.rank, ready: self.post.ready.clone(), gate: self.post.gate.clone() }
    }

    fn text(&self) -> String {
        format!("{} of {}, {} bytes", self.op, self.dtype, self.unit().unwrap_or_default())
    }
}

impl Board {
    /// The board of this id, which is made if it is not there.
    pub(crate) fn find(id: BoardId, size: u32) -> Arc<Self> {
        let mut boards = BOARDS.lock().unwrap_or_else(PoisonError::into_inner);
        boards.retain(|_, board| board.strong_count() > 0);
        if let Some(board) = boards.get(&id).and_then(Weak::upgrade) {
            return board;
        }
        let ranks = size as usize;
        let state = State { devices: vec![None; ranks], next: vec![0; ranks], ..State::default() };
        let board = Arc::new(Self { size, state: Mutex::new(state) });
        boards.insert(id, Arc::downgrade(&board));
        board
    }

    pub(crate) fn come(&self, rank: u32, device: &Arc<dyn Device>) -> Result<(), CommError> {
        let mut state = self.lock();
        state.devices[rank as usize] = Some(Arc::clone(device));
        let devices: Option<Vec<_>> = state.devices.iter().cloned().collect();
        if let Some(devices) = devices {
            state.shared = Some(Arc::new(Devices::new(devices)?));
        }
        Ok(())
    }

    /// A rank is gone: rounds wait for it in vain, and so do those that exchange something with it.
    pub(crate) fn leave(&self, rank: u32) {
        let how = "it dropped its communicator".to_owned();
        let failure = Arc::new(CollectiveFailure::PeerLost { rank, how }.into());
        self.end(&failure, |(from, to)| from == rank || to == rank);
    }

    /// Fails what waits for calls of others, and what comes later.
    pub(crate) fn fail(&self, failure: &Arc<Failure>) {
        self.end(failure, |_| true);
    }

    /// Ends all rounds, and exchanges between these ranks.
    fn end(&self, failure: &Arc<Failure>, ends: impl Fn((u32, u32)) -> bool) {
        let mut state = self.lock();
        let failure = Arc::clone(state.failure.get_or_insert_with(|| Arc::clone(failure)));
        let State { rounds, sends, recvs, .. } = &mut *state;
        let pairs = [sends, recvs].into_iter().flat_map(|pairs| pairs.extract_if(|pair, _| ends(*pair)));
        let mut waiting: Vec<Posted> = pairs.flat_map(|(_, posted)| posted).collect();
        waiting.extend(std::mem::take(rounds).into_values().flatten().flatten());
        drop(state);
        // Outside the lock: failing a gate wakes others.
        waiting.iter().for_each(|posted| posted.post.gate.fail(&failure));
    }

    /// Puts a rank's calls on the board, and starts what is complete with them.
    pub(crate) fn post(&self, rank: u32, calls: &[CollectiveCall<'_>], post: &Post) {
        let mut complete: SmallVec<[Complete; 2]> = SmallVec::new();
        let shared = {
            let mut state = self.lock();
            if let Some(failure) = state.failure.clone() {
                drop(state);
                return post.gate.fail(&failure);
            }
            for call in calls {
                let posted = Posted {
                    rank,
                    op: call.op(),
                    dtype: call.dtype(),
                    src: call.src().cloned(),
                    dst: call.dst().cloned(),
                    post: post.clone(),
                };
                complete.extend(state.put(rank, self.size, posted));
            }
            state.shared.clone()
        };
        let Some(shared) = shared else { return };
        for complete in complete {
            // What differs ends all: calls behind it may have been put here by some ranks and not by others, and would
            // meet the wrong ones from here on.
            if let Err(failure) = start(&shared, complete)
                && is_of_one(&failure)
            {
                self.fail(&failure);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code of others runs under the lock, but for the opening of queues in `come`, which leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn put(&mut self, rank: u32, size: u32, posted: Posted) -> Option<Complete> {
        match posted.op {
            CollectiveOp::Send { to } => {
                match self.recvs.get_mut(&(rank, to)).and_then(VecDeque::pop_front) {
                    Some(recv) => return Some(Complete::Pair(Box::new([posted, recv]))),
                    None => self.sends.entry((rank, to)).or_default().push_back(posted),
                }
            }
            CollectiveOp::Recv { from } => {
                match self.sends.get_mut(&(from, rank)).and_then(VecDeque::pop_front) {
                    Some(send) => return Some(Complete::Pair(Box::new([send, posted]))),
                    None => self.recvs.entry((from, rank)).or_default().push_back(posted),
                }
            }
            _ => {
                let number = self.next[rank as usize];
                self.next[rank as usize] += 1;
                let round = self.rounds.entry(number).or_insert_with(|| vec![None; size as usize]);
                round[rank as usize] = Some(posted);
                if round.iter().all(Option::is_some) {
                    let round = self.rounds.remove(&number).unwrap_or_default();
                    return Some(Complete::Round(number, round.into_iter().flatten().collect()));
                }
            }
        }
        None
    }
}

/// Hands the devices what is complete. What goes wrong, everybody who takes part is told.
fn start(shared: &Devices, complete: Complete) -> Result<(), Arc<Failure>> {
    let party = |posted: &Posted| posted.party();
    let (parties, outcome): (Vec<_>, _) = match complete {
        Complete::Round(number, round) => {
            let outcome = agree(number, &round).and_then(|()| shared.start(&round));
            (round.iter().map(party).collect(), outcome)
        }
        Complete::Pair(pair) => (pair.iter().map(party).collect(), shared.pass(&pair[0], &pair[1])),
    };
    match outcome {
        Ok(points) => {
            open_behind(points, parties);
            Ok(())
        }
        Err(failure) => {
            parties.iter().for_each(|party| party.gate.fail(&failure));
            Err(failure)
        }
    }
}

fn agree(number: u64, round: &[Posted]) -> Result<(), Arc<Failure>> {
    let Some(other) = round.iter().position(|posted| !posted.matches(&round[0])) else { return Ok(()) };
    let what = format!("rank 0 called {}, rank {other} called {}", round[0].text(), round[other].text());
    Err(Arc::new(CollectiveFailure::Mismatch { number: number + 1, what }.into()))
}
