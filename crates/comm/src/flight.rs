//! The flight recorder: the last calls of a rank, and what became of them.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt, fs, io,
    num::NonZeroU64,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use warpweft_core_types::{CollectiveCall, CollectiveOp, DType, DeviceId, QueueId};

/// What is recorded, and where it goes when a communicator fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlightConfig {
    /// Calls that are remembered, besides those under way.
    pub capacity: usize,
    /// The folder that gets a file for each rank when the communicator fails; none is written if there is no folder.
    /// Several communicators may share it.
    pub folder: Option<PathBuf>,
}

impl Default for FlightConfig {
    fn default() -> Self {
        Self { capacity: 1024, folder: None }
    }
}

/// Which communicator a record is of: the same on all its ranks, and no other's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CommunicatorId {
    /// The run of its group; a split has a run of its own.
    pub run: String,
    /// How often its group had formed anew.
    pub epoch: u32,
    /// A number that rank 0 drew, since a run may have several groups.
    pub mark: u32,
}

impl fmt::Display for CommunicatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}-{:08x}", self.run, self.epoch, self.mark)
    }
}

impl CommunicatorId {
    /// As part of a file's name. Runs are named by people, who may use any letters; the mark tells apart what is alike
    /// without them.
    fn file_stem(&self) -> String {
        const LONGEST: usize = 64;
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_';
        let run: String = self
            .run
            .chars()
            .take(LONGEST)
            .map(|letter| if is_plain(letter) { letter } else { '_' })
            .collect();
        format!("{run}.{}-{:08x}", self.epoch, self.mark)
    }
}

/// The last calls of one rank, as a file holds them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The communicator.
    pub communicator: CommunicatorId,
    /// How it came to be, in words: what it is a split of, or what it formed anew from.
    pub origin: String,
    /// The rank.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
    /// Its device.
    pub device: String,
    /// Why the communicator failed, if it did.
    pub failure: Option<String>,
    /// Ranks that this one knows to be lost.
    pub lost: Vec<u32>,
    /// Later calls may have other numbers on other ranks: a call that differed between them failed a queue, and some
    /// ranks had put calls behind it that others were refused. None if all numbers agree.
    pub numbers_agree_until: Option<u64>,
    /// How many sends and receives it has begun, by the other rank.
    pub exchanged: Vec<Exchanged>,
    /// The calls, oldest first.
    pub calls: Vec<CallRecord>,
}

/// Sends and receives that a rank has begun, with one other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchanged {
    /// The other rank.
    pub peer: u32,
    /// Sends to it.
    pub sent: u64,
    /// Receives from it.
    pub received: u64,
}

/// A send or receive of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// The other rank.
    pub peer: u32,
    /// Whether this rank gives.
    pub sends: bool,
    /// Its place among the sends to that rank or the receives from it. It meets the one with the same place there.
    pub number: u64,
}

/// One call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    /// The call's number; the same call has the same number on all ranks. Sends and receives have none.
    pub number: Option<u64>,
    /// What was called, in words that all ranks share.
    pub call: String,
    /// The sends and receives in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exchanges: Vec<Exchange>,
    /// The engine.
    pub engine: String,
    /// The queue, if it is in one.
    pub queue: Option<String>,
    /// When it was called, in microseconds since the communicator was made. Of a call in a queue, when it was seen there
    /// first, up to 50 ms later, and rarely a second: a reading of the clock would cost as much as the rest of the record.
    pub called_us: u64,
    /// When it was seen to be over.
    pub over_us: Option<u64>,
}

/// What a call is, the same on all ranks that call the same.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Signature {
    Calls {
        op: CollectiveOp,
        dtype: DType,
        /// Bytes of the smaller operand: a root's larger one is its own.
        bytes: u64,
        /// Calls that begin together.
        count: usize,
    },
    Replay {
        /// Those in it that all ranks make.
        calls: usize,
    },
}

impl Signature {
    /// Of calls that begin together, if there are any.
    pub(crate) fn of(calls: &[CollectiveCall<'_>]) -> Option<Self> {
        let mut shared = calls.iter().filter(|call| !call.op().is_pairwise());
        // What a rank sends and receives beside them is its own affair.
        let (first, count) = match shared.next() {
            Some(first) => (first, 1 + shared.count()),
            None => (calls.first()?, calls.len()),
        };
        let sizes = [first.src(), first.dst()].into_iter().flatten().map(|view| view.size());
        let bytes = sizes.min().unwrap_or_default();
        Some(Self::Calls { op: first.op(), dtype: first.dtype(), bytes, count })
    }

    /// All calls of a group that all ranks make, in words.
    pub(crate) fn text_of_all(calls: &[CollectiveCall<'_>]) -> String {
        let shared = calls.iter().filter(|call| !call.op().is_pairwise());
        let texts = shared.filter_map(|call| Self::of(&[*call])).map(|signature| signature.text());
        texts.collect::<Vec<_>>().join(" with ")
    }

    /// In words.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Calls { op, dtype, bytes, count: 1 } => format!("{op} of {dtype}, {bytes} bytes"),
            Self::Calls { op, dtype, bytes, count } => {
                format!("{count} calls from {op} of {dtype}, {bytes} bytes")
            }
            Self::Replay { calls: 1 } => "replay of a graph with 1 call".to_owned(),
            Self::Replay { calls } => format!("replay of a graph with {calls} calls"),
        }
    }

    /// Whether all ranks make this call.
    pub(crate) const fn is_for_all(&self) -> bool {
        match self {
            Self::Calls { op, .. } => !op.is_pairwise(),
            Self::Replay { .. } => true,
        }
    }
}

/// The sends and receives of calls that begin together; their numbers are given when they are noted.
pub(crate) type Exchanges = SmallVec<[Exchange; 2]>;

pub(crate) fn exchanges_of(calls: &[CollectiveCall<'_>]) -> Exchanges {
    let of = |call: &CollectiveCall<'_>| match call.op() {
        CollectiveOp::Send { to } => Some(Exchange { peer: to, sends: true, number: 0 }),
        CollectiveOp::Recv { from } => Some(Exchange { peer: from, sends: false, number: 0 }),
        _ => None,
    };
    calls.iter().filter_map(of).collect()
}

/// Which call of a rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Called {
    /// Its place among all calls of this rank.
    pub(crate) ticket: u64,
    /// Its place among those that all ranks make.
    pub(crate) number: Option<u64>,
}

/// What is remembered of a call. Every call writes the next one, so it takes few lines of the cache.
#[derive(Debug)]
struct Entry {
    ticket: u64,
    number: Option<NonZeroU64>,
    signature: Signature,
    exchanges: Option<Box<[Exchange]>>,
    engine: &'static str,
    /// The queue's number: all are of one device.
    queue: Option<u32>,
    /// When it was seen first.
    called: Option<Moment>,
    over: Option<Moment>,
}

/// Nanoseconds since the communicator was made.
type Moment = NonZeroU64;

/// Room that is made for calls before there are any.
const MOST_AT_ONCE: usize = 1024;

/// The ring of a communicator.
#[derive(Debug)]
pub(crate) struct Flight {
    start: Instant,
    config: FlightConfig,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    entries: VecDeque<Entry>,
    /// How many of them are under way.
    open: usize,
    /// The sends and receives so far, by the other rank.
    exchanged: BTreeMap<u32, [u64; 2]>,
    /// The last call whose number is surely that of the other ranks, if there is doubt.
    doubtful: Option<u64>,
}

impl Ring {
    /// The exchanges of a call with their numbers.
    fn counted(&mut self, exchanges: &[Exchange]) -> Box<[Exchange]> {
        let mut number = |exchange: &Exchange| {
            let count = self.exchanges(exchange);
            *count += 1;
            Exchange { number: *count, ..*exchange }
        };
        exchanges.iter().map(&mut number).collect()
    }

    fn exchanges(&mut self, exchange: &Exchange) -> &mut u64 {
        &mut self.exchanged.entry(exchange.peer).or_default()[usize::from(!exchange.sends)]
    }

    /// Notes when calls were seen that nobody has looked at since they were made.
    fn see(&mut self, now: Moment) {
        let unseen = self.entries.iter_mut().rev().take_while(|entry| entry.called.is_none());
        unseen.for_each(|entry| entry.called = Some(now));
    }

    /// Forgets the oldest calls that are too many. Those under way stay, since their age is what ends them.
    fn forget(&mut self, capacity: usize) {
        while self.entries.len() > capacity.max(self.open) {
            let Some(oldest) = self.entries.iter().position(|entry| entry.over.is_some()) else { return };
            self.entries.remove(oldest);
        }
    }
}

/// A call that is not over and has been under way the longest.
#[derive(Debug)]
pub(crate) struct Oldest {
    /// As records count; that of a send or receive is its place among all calls of its rank.
    pub(crate) number: u64,
    pub(crate) op: String,
    pub(crate) age: Duration,
}

impl Flight {
    pub(crate) fn new(config: FlightConfig) -> Self {
        // Any number may be asked for; more room is made when it is needed.
        let entries = VecDeque::with_capacity(config.capacity.min(MOST_AT_ONCE));
        let ring = Ring { entries, open: 0, exchanged: BTreeMap::new(), doubtful: None };
        Self { start: Instant::now(), config, ring: Mutex::new(ring) }
    }

    /// Notes a call. When one in a queue was made, whoever looks next notes; one that is waited for has the time.
    pub(crate) fn begin(
        &self,
        call: Called,
        signature: Signature,
        exchanges: &[Exchange],
        (engine, queue): (&'static str, Option<u32>),
    ) {
        let Called { ticket, number } = call;
        let now = queue.is_none().then(|| self.now());
        let mut ring = self.lock();
        if let Some(now) = now {
            ring.see(now);
        }
        let number = number.and_then(NonZeroU64::new);
        let exchanges = if exchanges.is_empty() { None } else { Some(ring.counted(exchanges)) };
        let entry = Entry { ticket, number, signature, exchanges, engine, queue, called: now, over: None };
        ring.entries.push_back(entry);
        ring.open += 1;
        ring.forget(self.config.capacity);
    }

    fn now(&self) -> Moment {
        let nanos = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Moment::new(nanos).unwrap_or(Moment::MIN)
    }

    /// A call that was refused never was.
    pub(crate) fn retract(&self, ticket: u64) {
        let mut ring = self.lock();
        if let Some(at) =
            ring.entries.iter().rposition(|entry| entry.ticket == ticket && entry.over.is_none())
        {
            let entry = ring.entries.remove(at);
            ring.open -= 1;
            let exchanges = entry.and_then(|entry| entry.exchanges).unwrap_or_default();
            for exchange in exchanges.iter().rev() {
                let count = ring.exchanges(exchange);
                // What was called since keeps its place.
                *count -= u64::from(*count == exchange.number);
            }
        }
    }

    /// Notes that a queue has failed by a call that differs between ranks. Which of its calls it was is not known, nor
    /// how many the other ranks had put behind it.
    pub(crate) fn doubt(&self, queue: u32) {
        let mut ring = self.lock();
        let mut open = ring.entries.iter().filter(|entry| entry.queue == Some(queue) && entry.over.is_none());
        let first = open.find_map(|entry| entry.number).map(NonZeroU64::get);
        ring.doubtful = [ring.doubtful, first].into_iter().flatten().min();
    }

    pub(crate) fn doubtful(&self) -> Option<u64> {
        self.lock().doubtful
    }

    pub(crate) fn exchanged(&self) -> Vec<Exchanged> {
        let of = |(peer, [sent, received]): (&u32, &[u64; 2])| Exchanged {
            peer: *peer,
            sent: *sent,
            received: *received,
        };
        self.lock().exchanged.iter().map(of).collect()
    }

    /// Notes that the calls of a queue are over up to this one, or the one that was in none.
    pub(crate) fn end(&self, queue: Option<u32>, ticket: u64) {
        let now = self.now();
        let mut ring = self.lock();
        ring.see(now);
        // What is before one that is over in a queue is over too.
        let is_own = |entry: &&mut Entry| {
            entry.queue == queue && (entry.ticket == ticket || (queue.is_some() && entry.ticket < ticket))
        };
        let own = ring.entries.iter_mut().rev().filter(is_own);
        let ended = own.take_while(|entry| entry.over.is_none()).map(|entry| entry.over = Some(now)).count();
        ring.open -= ended;
        ring.forget(self.config.capacity);
    }

    pub(crate) fn oldest(&self) -> Option<Oldest> {
        let now = self.now();
        let mut ring = self.lock();
        ring.see(now);
        let entry = ring.entries.iter().find(|entry| entry.over.is_none())?;
        let number = entry.number.map_or(entry.ticket, NonZeroU64::get);
        let age = now.get().saturating_sub(entry.called.map_or(0, NonZeroU64::get));
        Some(Oldest { number, op: entry.signature.text(), age: Duration::from_nanos(age) })
    }

    /// All that are remembered, in queues of this device.
    pub(crate) fn calls(&self, device: DeviceId) -> Vec<CallRecord> {
        let now = self.now();
        let micros = |at: Moment| at.get() / 1000;
        let queue = |number: u32| QueueId { device, number }.to_string();
        let record = |entry: &Entry| CallRecord {
            number: entry.number.map(NonZeroU64::get),
            call: entry.signature.text(),
            exchanges: entry.exchanges.as_deref().unwrap_or_default().to_vec(),
            engine: entry.engine.to_owned(),
            queue: entry.queue.map(queue),
            called_us: micros(entry.called.unwrap_or(now)),
            over_us: entry.over.map(micros),
        };
        let mut ring = self.lock();
        ring.see(now);
        ring.entries.iter().map(record).collect()
    }

    /// Writes a rank's file, if there is a folder for it.
    pub(crate) fn write(&self, record: &FlightRecord) -> io::Result<()> {
        let Some(folder) = &self.config.folder else { return Ok(()) };
        record.write_to(folder).map(|_| ())
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        // No code of others runs under the lock.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FlightRecord {
    /// Writes it into a folder, which is made if it is not there, as a file that is named for the communicator and the
    /// rank.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn write_to(&self, folder: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(folder)?;
        let name = format!("{}.rank-{}.json", self.communicator.file_stem(), self.rank);
        let (path, fresh) = (folder.join(&name), folder.join(format!(".{name}")));
        fs::write(&fresh, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&fresh, &path)?;
        Ok(path)
    }

    /// Reads all files of a folder, by communicator and rank; [`Self::by_communicator`] parts them.
    ///
    /// # Errors
    ///
    /// The system's; a file that is no record is [`io::ErrorKind::InvalidData`] and named.
    pub fn read_all(folder: &Path) -> io::Result<Vec<Self>> {
        let mut records = Vec::new();
        for file in fs::read_dir(folder)? {
            let path = file?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with('.') || !(name.contains(".rank-") && name.ends_with(".json")) {
                continue;
            }
            let record = serde_json::from_slice(&fs::read(&path)?);
            let wrong =
                |error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()));
            records.push(record.map_err(wrong)?);
        }
        records.sort_by_cached_key(|record: &Self| (record.communicator.clone(), record.rank));
        Ok(records)
    }

    /// Parts records that are [sorted](Self::read_all), one part for each communicator.
    pub fn by_communicator(records: &[Self]) -> impl Iterator<Item = &[Self]> {
        records.chunk_by(|one, other| one.communicator == other.communicator)
    }
}

/// Who is to blame for a communicator that failed, as far as the records of its ranks tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// These ranks left no record, or are known to be lost by those who did.
    Lost {
        /// The ranks.
        ranks: Vec<u32>,
        /// The last call that the others had made.
        number: u64,
        /// What it was.
        call: String,
    },
    /// These ranks called something else than most.
    Differs {
        /// The ranks.
        ranks: Vec<u32>,
        /// The call's number.
        number: u64,
        /// What they called.
        called: String,
        /// What the others called.
        others: String,
    },
    /// These ranks never made a call that the others made.
    Missing {
        /// The ranks.
        ranks: Vec<u32>,
        /// The first call that they did not make.
        number: u64,
        /// What it was.
        call: String,
    },
    /// All made this call, and it was over on these ranks only.
    Stuck {
        /// Ranks on which it is not over.
        ranks: Vec<u32>,
        /// The call's number.
        number: u64,
        /// What it was.
        call: String,
    },
    /// A send or receive met nobody: the other rank never made its part.
    Unmet {
        /// Who waits.
        rank: u32,
        /// What it called.
        call: String,
        /// The send or receive in it.
        exchange: Exchange,
    },
    /// Nothing is wrong with the calls that can be compared, but the numbers of later ones may differ between ranks: see
    /// [`FlightRecord::numbers_agree_until`].
    Unclear {
        /// The last call whose number is surely the same on all ranks.
        agree_until: u64,
    },
    /// Everything that is remembered was over.
    Clean,
}

impl Verdict {
    /// Compares the records of one communicator's ranks.
    ///
    /// A rank that waits for a partner makes no further calls, and others miss it there; so what met nobody is named
    /// before calls that somebody never made or did not end.
    pub fn of(records: &[FlightRecord]) -> Self {
        match Self::of_numbered(records) {
            verdict @ (Self::Lost { .. } | Self::Differs { .. }) => verdict,
            verdict => unmet(records).unwrap_or(verdict),
        }
    }

    /// Of the calls that all ranks make.
    fn of_numbered(records: &[FlightRecord]) -> Self {
        let Some(size) = records.iter().map(|record| record.size).max() else { return Self::Clean };
        let lost = lost(records, size);
        let newest =
            records.iter().filter_map(|record| numbered(record).last()).max_by_key(|(number, _)| *number);
        if !lost.is_empty() {
            let (number, call) =
                newest.map_or((0, "nothing yet".to_owned()), |(n, call)| (n, call.call.clone()));
            return Self::Lost { ranks: lost, number, call };
        }
        let Some((last, _)) = newest else { return Self::Clean };
        // Older ones are not remembered by all.
        let first =
            records.iter().filter_map(|record| numbered(record).next()).map(|(number, _)| number).max();
        // Behind it a rank would be compared with others at another call.
        let agree_until = records.iter().filter_map(|record| record.numbers_agree_until).min();
        for number in first.unwrap_or(0)..=agree_until.map_or(last, |until| until.min(last)) {
            let find = |record| numbered(record).find(|(own, _)| *own == number).map(|(_, call)| call);
            let calls: Vec<_> = records.iter().map(|record| (record.rank, find(record))).collect();
            if let Some(verdict) = judge(number, &calls) {
                return verdict;
            }
        }
        let unclear = agree_until.filter(|until| *until < last);
        unclear.map_or(Self::Clean, |agree_until| Self::Unclear { agree_until })
    }
}

/// The calls that all ranks make, with their numbers.
fn numbered(record: &FlightRecord) -> impl Iterator<Item = (u64, &CallRecord)> {
    record.calls.iter().filter_map(|call| call.number.map(|number| (number, call)))
}

fn lost(records: &[FlightRecord], size: u32) -> Vec<u32> {
    let has_record = |rank: u32| records.iter().any(|record| record.rank == rank);
    let is_known_lost = |rank: u32| records.iter().any(|record| record.lost.contains(&rank));
    (0..size).filter(|rank| !has_record(*rank) || is_known_lost(*rank)).collect()
}

/// The first send or receive that is not over and whose partner never came.
fn unmet(records: &[FlightRecord]) -> Option<Verdict> {
    let came = |rank: u32, exchange: &Exchange| {
        let partner = records.iter().find(|record| record.rank == exchange.peer)?;
        let counts = partner.exchanged.iter().find(|counts| counts.peer == rank);
        let count = counts.map(|counts| if exchange.sends { counts.received } else { counts.sent });
        Some(count.unwrap_or(0) >= exchange.number)
    };
    let open = records.iter().flat_map(|record| {
        let (rank, calls) = (record.rank, record.calls.iter().filter(|call| call.over_us.is_none()));
        calls.flat_map(move |call| call.exchanges.iter().map(move |exchange| (rank, call, exchange)))
    });
    let first = open
        .filter(|(rank, _, exchange)| came(*rank, exchange) == Some(false))
        .min_by_key(|(rank, call, _)| (call.called_us, *rank));
    first.map(|(rank, call, exchange)| Verdict::Unmet { rank, call: call.call.clone(), exchange: *exchange })
}

/// What is wrong with one call, if something is.
fn judge(number: u64, calls: &[(u32, Option<&CallRecord>)]) -> Option<Verdict> {
    let made: Vec<_> = calls.iter().filter_map(|(rank, call)| call.map(|call| (*rank, call))).collect();
    let common = most_common(&made)?;
    let differing: Vec<_> = made.iter().filter(|(_, call)| call.call != common).collect();
    if let Some((_, call)) = differing.first() {
        let ranks = differing.iter().map(|(rank, _)| *rank).collect();
        return Some(Verdict::Differs {
            ranks,
            number,
            called: call.call.clone(),
            others: common.to_owned(),
        });
    }
    let missing: Vec<_> = calls.iter().filter(|(_, call)| call.is_none()).map(|(rank, _)| *rank).collect();
    if !missing.is_empty() {
        return Some(Verdict::Missing { ranks: missing, number, call: common.to_owned() });
    }
    let unfinished = made.iter().filter(|(_, call)| call.over_us.is_none());
    let unfinished: Vec<_> = unfinished.map(|(rank, _)| *rank).collect();
    (!unfinished.is_empty()).then(|| Verdict::Stuck { ranks: unfinished, number, call: common.to_owned() })
}

/// What most ranks called.
fn most_common<'a>(made: &[(u32, &'a CallRecord)]) -> Option<&'a str> {
    let count = |text: &str| made.iter().filter(|(_, call)| call.call == text).count();
    // The first of those that are equally common.
    let best = made.iter().map(|(_, call)| count(&call.call)).max()?;
    made.iter().map(|(_, call)| call.call.as_str()).find(|text| count(text) == best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rank: u32, calls: &[(&str, bool)]) -> FlightRecord {
        let call = |(number, (text, over)): (u64, &(&str, bool))| CallRecord {
            number: Some(number),
            call: (*text).to_owned(),
            exchanges: Vec::new(),
            engine: "host".to_owned(),
            queue: None,
            called_us: number,
            over_us: over.then_some(number + 1),
        };
        FlightRecord {
            communicator: CommunicatorId { run: "a run".to_owned(), epoch: 0, mark: 7 },
            origin: "made by the program".to_owned(),
            rank,
            size: 3,
            device: format!("host:{rank}"),
            failure: None,
            lost: Vec::new(),
            numbers_agree_until: None,
            exchanged: Vec::new(),
            calls: (1..).zip(calls).map(call).collect(),
        }
    }

    #[test]
    fn a_rank_without_a_record_is_lost() {
        let records = [record(0, &[("a", true), ("b", false)]), record(2, &[("a", true), ("b", false)])];
        assert_eq!(Verdict::of(&records), Verdict::Lost { ranks: vec![1], number: 2, call: "b".to_owned() });
    }

    #[test]
    fn a_rank_that_is_lost_before_any_call_is_named() {
        let records = [record(0, &[]), record(2, &[])];
        assert!(matches!(Verdict::of(&records), Verdict::Lost { ranks, number: 0, .. } if ranks == [1]));
    }

    #[test]
    fn a_rank_that_calls_something_else_is_named() {
        let same = [("a", true), ("b", false)];
        let records = [record(0, &same), record(1, &[("a", true), ("c", false)]), record(2, &same)];
        let verdict = Verdict::of(&records);
        let Verdict::Differs { ranks, number: 2, called, others } = verdict else { panic!("{verdict:?}") };
        assert_eq!((ranks, called.as_str(), others.as_str()), (vec![1], "c", "b"));
    }

    #[test]
    fn a_rank_that_never_calls_is_named_with_the_first_call_it_lacks() {
        let same = [("a", true), ("b", false), ("c", false)];
        let records = [record(0, &same), record(1, &[("a", true)]), record(2, &same)];
        assert_eq!(
            Verdict::of(&records),
            Verdict::Missing { ranks: vec![1], number: 2, call: "b".to_owned() }
        );
    }

    #[test]
    fn a_call_that_all_made_and_some_did_not_end_is_stuck() {
        let records = [record(0, &[("a", true)]), record(1, &[("a", false)]), record(2, &[("a", true)])];
        assert_eq!(Verdict::of(&records), Verdict::Stuck { ranks: vec![1], number: 1, call: "a".to_owned() });
    }

    #[test]
    fn calls_that_are_over_leave_nobody_to_blame() {
        let records = [0, 1, 2].map(|rank| record(rank, &[("a", true)]));
        assert_eq!(Verdict::of(&records), Verdict::Clean);
    }

    #[test]
    fn nobody_is_blamed_by_numbers_that_may_differ() {
        let check = |agree_until: [Option<u64>; 3], expected: Verdict| {
            // Rank 1 was refused the second call, so that its third is the fourth of the others.
            let same = [("a", true), ("b", true), ("c", true), ("d", true)];
            let mut records =
                [record(0, &same), record(1, &[("a", true), ("c", true), ("d", true)]), record(2, &same)];
            for (record, until) in records.iter_mut().zip(agree_until) {
                record.numbers_agree_until = until;
            }
            assert_eq!(Verdict::of(&records), expected);
        };
        let (called, others) = ("c".to_owned(), "b".to_owned());
        let differs = Verdict::Differs { ranks: vec![1], number: 2, called, others };
        check([None, None, None], differs.clone());
        check([None, Some(3), Some(2)], differs);
        check([Some(3), Some(1), None], Verdict::Unclear { agree_until: 1 });
        // The call that differed is not remembered.
        check([Some(0), None, None], Verdict::Unclear { agree_until: 0 });
        let records = [0, 1, 2]
            .map(|rank| FlightRecord { numbers_agree_until: Some(1), ..record(rank, &[("a", true)]) });
        assert_eq!(Verdict::of(&records), Verdict::Clean);
    }

    /// A rank whose last call sends to the next rank or receives from it, as its third.
    fn exchanging(rank: u32, sends: bool, is_over: bool) -> FlightRecord {
        let peer = (rank + 1) % 3;
        let mut record = record(rank, &[("a", true), ("pass on", is_over)]);
        let call = &mut record.calls[1];
        (call.number, call.exchanges) = (None, vec![Exchange { peer, sends, number: 3 }]);
        let (sent, received) = if sends { (3, 0) } else { (0, 3) };
        record.exchanged = vec![Exchanged { peer, sent, received }];
        record
    }

    #[test]
    fn a_send_or_receive_that_meets_nobody_is_named() {
        let check = |sends, is_over, partner: Option<[u64; 2]>, is_unmet| {
            let mut others =
                [record(1, &[("a", true), ("b", false)]), record(2, &[("a", true), ("b", false)])];
            let [sent, received] = partner.unwrap_or_default();
            others[0].exchanged =
                partner.map(|_| Exchanged { peer: 0, sent, received }).into_iter().collect();
            let [one, two] = others;
            let verdict = Verdict::of(&[exchanging(0, sends, is_over), one, two]);
            let exchange = Exchange { peer: 1, sends, number: 3 };
            let unmet = Verdict::Unmet { rank: 0, call: "pass on".to_owned(), exchange };
            // Rank 0 has not come to the call of the others in any case.
            assert_eq!(verdict == unmet, is_unmet, "{verdict:?}");
            assert!(is_unmet || matches!(verdict, Verdict::Missing { number: 2, .. }), "{verdict:?}");
        };
        check(true, false, None, true);
        check(true, false, Some([9, 2]), true);
        check(true, false, Some([0, 3]), false);
        check(false, false, Some([2, 9]), true);
        check(false, false, Some([3, 0]), false);
        // What was taken without having arrived holds nobody up.
        check(true, true, None, false);
    }

    #[test]
    fn files_of_several_communicators_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let written = |run: &str, epoch, mark, rank| {
            let communicator = CommunicatorId { run: run.to_owned(), epoch, mark };
            let record = FlightRecord { communicator, ..record(rank, &[("a", true), ("b", false)]) };
            record.write_to(folder.path()).unwrap();
            record
        };
        let long = "x".repeat(128);
        let kept = [
            written("a/../b", 0, 1, 0),
            written("a/../b", 0, 1, 1),
            written("a/../b", 0, 2, 1),
            written("a/../b", 1, 1, 1),
            written("a:..:b", 1, 9, 1),
            written(&long, 0, 3, 0),
        ];
        let read = FlightRecord::read_all(folder.path()).unwrap();
        assert_eq!(read, kept);
        let parts: Vec<_> = FlightRecord::by_communicator(&read).map(<[_]>::len).collect();
        assert_eq!(parts, [2, 1, 1, 1, 1]);
    }
}
