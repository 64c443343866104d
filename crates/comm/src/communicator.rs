//! Communicators: one rank of a group of devices that compute together.

use std::{collections::BTreeSet, fmt, ops::Range, sync::Arc};

use smallvec::SmallVec;
use warpweft_bootstrap::{Group, ReformConfig};
use warpweft_core_types::{
    Buffer, BufferView, CallError, CollectiveCall, CollectiveFailure, CollectiveOp, DType, Deadline, Device,
    Failure, PreparedGraph, Queue, RangeError, ReduceOp, Registration, RegistrationKind,
};

use crate::{
    Call, Calls, CommConfig, CommError, CommunicatorId, EngineKind, Enqueued, FlightRecord, Measured,
    inner::{Inner, failed},
    keeper::Keeper,
    split,
};

/// One rank of a group of devices that move and reduce data together.
///
/// Any thread may use it. What is enqueued in which order has to be the same on all ranks; sends and receives only have
/// to be in order between the two.
///
/// Dropping it leaves the group, once its own calls under way have ended; what has not ended in half a second is ended.
/// No drop waits for that. Calls that the others have under way may still end, for half a second too; what comes after
/// fails on them. A graph with nodes of it that is replayed later fails its queue or is refused.
pub struct Communicator {
    /// Before the rest, which it watches.
    _keeper: Keeper,
    pub(crate) inner: Arc<Inner>,
}

impl Communicator {
    /// Makes `device` a rank: that of this process or thread in `group`. All members do so at about the same time, with
    /// the same configuration.
    ///
    /// # Errors
    ///
    /// [`CommError::DuplicateDevice`], [`CommError::Disagreement`], [`CommError::NoEngine`], and what the group and the
    /// engines say, the same on all ranks; each by the deadline.
    pub fn create(
        group: Group,
        device: &Arc<dyn Device>,
        config: &CommConfig,
        deadline: impl Into<Deadline>,
    ) -> Result<Self, CommError> {
        Self::create_as("made by the program".to_owned(), group, device, config, deadline.into())
    }

    fn create_as(
        origin: String,
        group: Group,
        device: &Arc<dyn Device>,
        config: &CommConfig,
        deadline: Deadline,
    ) -> Result<Self, CommError> {
        let inner = Inner::new(Arc::new(group), device, config, origin, deadline)?;
        Ok(Self { _keeper: Keeper::start(Arc::clone(&inner))?, inner })
    }

    /// Which communicator it is, the same on all its ranks; records name it.
    pub fn id(&self) -> &CommunicatorId {
        self.inner.id()
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.inner.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> u32 {
        self.inner.group().size()
    }

    /// Which of the ranks of its host this is.
    pub fn local_rank(&self) -> u32 {
        let members = self.inner.group().members();
        let own = &members[self.inner.group().rank().index()];
        let before = members.iter().take_while(|member| member.rank != own.rank);
        count(before.filter(|member| member.host == own.host))
    }

    /// Which of the hosts of the group it is on, counted by their first ranks.
    pub fn node(&self) -> u32 {
        let members = self.inner.group().members();
        let own = members[self.inner.group().rank().index()].host;
        let hosts: BTreeSet<_> =
            members.iter().take_while(|member| member.host != own).map(|member| member.host).collect();
        count(hosts.iter())
    }

    /// This rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.inner.device()
    }

    /// The group of processes or threads.
    pub fn group(&self) -> &Group {
        self.inner.group()
    }

    /// Its engines, the one that is asked first in front.
    pub fn engines(&self) -> impl Iterator<Item = EngineKind> {
        self.inner.engines().map(|engine| engine.kind())
    }

    /// The engine that does this where nothing else was measured, the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`].
    pub fn engine_for(&self, op: CollectiveOp, dtype: DType) -> Result<EngineKind, CommError> {
        self.inner.pick([(op, dtype)].into_iter()).map(|engine| engine.kind())
    }

    /// What was measured of engines when it was made, see [`CommConfig::tuning`]: the same on all ranks, and nothing if it
    /// was not asked for.
    pub fn measured(&self) -> &[Measured] {
        self.inner.dispatch().measured()
    }

    /// What is known of calls of so many bytes from rank to rank, `captured` where they are nodes of graphs; nothing where
    /// [`Self::engine_for`] takes them.
    pub fn measured_for(
        &self,
        op: CollectiveOp,
        dtype: DType,
        bytes: u64,
        captured: bool,
    ) -> Option<&Measured> {
        self.inner.dispatch().find(op, dtype, bytes, captured).map(|(measured, _)| measured)
    }

    /// A call of any kind; the other methods are this with names.
    ///
    /// # Errors
    ///
    /// [`CommError::Call`] if the operands do not fit, before anything is done.
    pub fn call<'a>(
        &'a self,
        op: CollectiveOp,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: Option<&'a BufferView>,
    ) -> Result<Call<'a>, CommError> {
        let place = (self.rank(), self.world_size());
        Ok(Call { comm: self, call: CollectiveCall::new(op, dtype, place, src, dst)? })
    }

    /// Gives every rank what all ranks' elements reduce to. In place if both views are the same.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_reduce<'a>(
        &'a self,
        op: ReduceOp,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::AllReduce(op), dtype, Some(src), Some(dst))
    }

    /// The same in place.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_reduce_in_place<'a>(
        &'a self,
        op: ReduceOp,
        dtype: DType,
        view: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.all_reduce(op, dtype, view, view)
    }

    /// Gives rank `r` part `r` of what all ranks' elements reduce to: `src` is as long as all parts together. In place
    /// if `dst` is this rank's part of `src`.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn reduce_scatter<'a>(
        &'a self,
        op: ReduceOp,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::ReduceScatter(op), dtype, Some(src), Some(dst))
    }

    /// Gives one rank what all ranks' elements reduce to; it alone has a destination.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn reduce<'a>(
        &'a self,
        root: u32,
        op: ReduceOp,
        dtype: DType,
        src: &'a BufferView,
        dst: Option<&'a BufferView>,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Reduce { op, root }, dtype, Some(src), dst)
    }

    /// Gives every rank what all have, by rank: `dst` is as long as all sources together. In place if `src` is this
    /// rank's part of `dst`.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_gather<'a>(
        &'a self,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::AllGather, dtype, Some(src), Some(dst))
    }

    /// Gives every rank what one has, which alone has a source: the same view as `dst` if it is in place.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn broadcast<'a>(
        &'a self,
        root: u32,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Broadcast { root }, dtype, src, Some(dst))
    }

    /// Gives one rank what all have, by rank; it alone has a destination.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn gather<'a>(
        &'a self,
        root: u32,
        dtype: DType,
        src: &'a BufferView,
        dst: Option<&'a BufferView>,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Gather { root }, dtype, Some(src), dst)
    }

    /// Gives rank `r` part `r` of what one has, which alone has a source.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn scatter<'a>(
        &'a self,
        root: u32,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Scatter { root }, dtype, src, Some(dst))
    }

    /// Gives rank `r` part `r` of what each rank has, by rank.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_to_all<'a>(
        &'a self,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::AllToAll, dtype, Some(src), Some(dst))
    }

    /// Gives to a rank, which receives as much. Two ranks that give each other something use [`Self::send_recv`].
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn send<'a>(&'a self, to: u32, dtype: DType, src: &'a BufferView) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Send { to }, dtype, Some(src), None)
    }

    /// Takes what a rank sends.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn recv<'a>(&'a self, from: u32, dtype: DType, dst: &'a BufferView) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Recv { from }, dtype, None, Some(dst))
    }

    /// Gives to one rank and takes from one, at once.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn send_recv<'a>(
        &'a self,
        dtype: DType,
        (to, src): (u32, &'a BufferView),
        (from, dst): (u32, &'a BufferView),
    ) -> Result<Calls<'a>, CommError> {
        if src.overlap(dst) > 0 {
            return Err(CallError::from(RangeError::Overlap { bytes: src.overlap(dst) }).into());
        }
        Ok(self.send(to, dtype, src)?.and(self.recv(from, dtype, dst)?))
    }

    /// The parts of a view for each rank, for [`Self::all_to_all_v`]: the ranges are in bytes, by rank, and may be empty.
    ///
    /// # Errors
    ///
    /// [`CommError::Call`] for a range that leaves the view.
    pub fn parts(
        &self,
        view: &BufferView,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Option<BufferView>>, CommError> {
        let part = |range: &Range<u64>| {
            if range.start == range.end { Ok(None) } else { view.slice(range.clone()).map(Some) }
        };
        let parts: Result<Vec<_>, _> = ranges.iter().map(part).collect();
        Ok(parts.map_err(CallError::from)?)
    }

    /// Gives rank `r` the part `src[r]` and takes `dst[r]` from it, all at once; what one gives is as long as what the
    /// other takes, and nothing where that is nothing. Nothing is done where a rank has no part in it at all.
    ///
    /// # Errors
    ///
    /// As [`Self::call`]; [`CommError::Unsupported`] for lists that have no entry for each rank.
    pub fn all_to_all_v<'a>(
        &'a self,
        dtype: DType,
        src: &'a [Option<BufferView>],
        dst: &'a [Option<BufferView>],
    ) -> Result<Calls<'a>, CommError> {
        let size = self.world_size() as usize;
        if src.len() != size || dst.len() != size {
            let what = format!("all_to_all_v with {} sources and {} destinations", src.len(), dst.len());
            return Err(CommError::Unsupported { what, engines: format!("{size} ranks") });
        }
        let mut calls = SmallVec::new();
        for ((rank, src), dst) in (0..).zip(src).zip(dst) {
            if let Some(src) = src {
                calls.push(self.send(rank, dtype, src)?.call);
            }
            if let Some(dst) = dst {
                calls.push(self.recv(rank, dtype, dst)?.call);
            }
        }
        Ok(Calls { comm: self, calls })
    }

    /// Waits until every rank has come here. Work in queues is not waited for.
    ///
    /// # Errors
    ///
    /// [`CommError::Group`] by the deadline, naming who is missing.
    pub fn barrier(&self, deadline: impl Into<Deadline>) -> Result<(), CommError> {
        self.inner.usable()?;
        self.inner
            .group()
            .barrier("barrier of a communicator", deadline)
            .map_err(|error| self.inner.judge(error))
    }

    /// Puts a barrier in a queue: what comes behind it waits for what is before it on every rank.
    ///
    /// # Errors
    ///
    /// As [`Call::on`].
    pub fn queue_barrier(&self, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        let word = self.inner.word()?;
        self.all_reduce(ReduceOp::Max, DType::U32, word, word)?.on(queue)
    }

    /// Replays a graph that has nodes of this communicator, and remembers it as one call.
    ///
    /// # Errors
    ///
    /// As [`Call::on`].
    pub fn replay(&self, graph: &PreparedGraph, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        self.inner.replay(graph, queue)
    }

    /// Registers memory of this rank's device, for as long as what is returned lives, so that it is reached faster.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] where no engine has a use for it.
    pub fn register(
        &self,
        buffer: &Arc<dyn Buffer>,
        kind: RegistrationKind,
    ) -> Result<Arc<dyn Registration>, CommError> {
        self.inner.usable()?;
        self.inner.first()?.register(buffer, kind)
    }

    /// Allocates memory that every rank can register symmetrically.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] where no engine has such memory.
    pub fn allocate(&self, size: u64) -> Result<Arc<dyn Buffer>, CommError> {
        self.inner.usable()?;
        self.inner.first()?.allocate(size)
    }

    /// Why it can no longer be used, if it failed.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.inner.failure()
    }

    /// Whether calls can succeed: no rank is lost and nobody has aborted.
    pub fn is_healthy(&self) -> bool {
        self.inner.is_healthy()
    }

    /// Ends every call on every rank, under way or later.
    ///
    /// # Errors
    ///
    /// [`CommError::Group`] if the group cannot tell the others.
    pub fn abort(&self, reason: &str) -> Result<(), CommError> {
        self.inner.group().abort(reason)?;
        let (rank, reason) = (self.rank(), reason.to_owned());
        self.inner.fail(&failed(CollectiveFailure::Aborted { rank, reason }), false);
        Ok(())
    }

    /// Makes a communicator of those who are left; each of them calls this. What is under way in this one fails.
    ///
    /// # Errors
    ///
    /// As [`Self::create`], and what is told by [`Group::reform`].
    pub fn shrink(&self, deadline: impl Into<Deadline>) -> Result<Self, CommError> {
        self.reform(&ReformConfig::default(), deadline)
    }

    /// The same with newcomers, such as a rank that was started again and comes by [`Group::rejoin`], or without some
    /// who are still there.
    ///
    /// # Errors
    ///
    /// As [`Self::shrink`].
    pub fn reform(&self, config: &ReformConfig, deadline: impl Into<Deadline>) -> Result<Self, CommError> {
        let deadline = deadline.into();
        let rank = self.rank();
        self.inner.fail(&failed(CollectiveFailure::Aborted { rank, reason: "it forms anew".into() }), false);
        let reformed = self.inner.group().reform_with(config, deadline)?;
        let origin = format!("formed anew from {}, rank {rank} there", self.id());
        Self::create_as(origin, reformed.group, self.device(), self.inner.config(), deadline)
    }

    /// Parts the ranks: those with the same colour make a communicator of their own, in the order of their keys and then
    /// of their ranks. A rank without a colour gets none. All ranks call it.
    ///
    /// # Errors
    ///
    /// As [`Self::create`].
    pub fn split(
        &self,
        color: Option<u32>,
        key: i32,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<Self>, CommError> {
        let deadline = deadline.into();
        self.inner.usable()?;
        let Some((rendezvous, config)) = split::part(self.inner.group(), color, key, deadline)? else {
            return Ok(None);
        };
        let group = Group::join(rendezvous, config, deadline)?;
        let color = color.unwrap_or_default();
        let origin = format!("split of {}, colour {color}, rank {} there", self.id(), self.rank());
        Self::create_as(origin, group, self.device(), self.inner.config(), deadline).map(Some)
    }

    /// The last calls, and what became of them.
    pub fn flight(&self) -> FlightRecord {
        self.inner.look();
        self.inner.record()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

fn count<T>(things: impl Iterator<Item = T>) -> u32 {
    split::to_u32(things.count())
}
