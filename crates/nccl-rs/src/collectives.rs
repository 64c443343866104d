//! What all ranks, or two, do with their buffers.
//!
//! Every call is checked here for what the library would not notice: lengths, types, devices, and overlaps that are
//! neither none nor the call's own way of working in place.

use std::ffi::c_int;

use crate::{
    communicator::{Communicator, to_int},
    error::Error,
    group,
    memory::{Dst, Span, Src},
    reduction::Reduction,
    stream::Stream,
    sys::{self, Comm},
};

const SAME: &str = "both begin at the same address";
const OWN_PART_OF_DST: &str = "the source is this rank's part of the destination";
const OWN_PART_OF_SRC: &str = "the destination is this rank's part of the source";
const NEVER: &str = "this call does not work";

impl Communicator {
    /// Reduces the elements of all ranks; every rank gets the result. Source and destination may be the same.
    ///
    /// # Errors
    ///
    /// As every call here: the errors of class [`Usage`](crate::ErrorClass::Usage) for arguments that do not fit, of
    /// which other ranks learn nothing; [`Error::Nccl`] for what the library finds; [`Error::TimedOut`] if it does not
    /// take the call; [`Error::Gone`] after an abort.
    pub fn all_reduce<'a>(
        &self,
        src: &Src<'_>,
        dst: &mut Dst<'_>,
        op: impl Into<Reduction<'a>>,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.all_reduce_spans(&src.span, &dst.span, op.into(), stream)
    }

    /// [`Self::all_reduce`] with the result in the place of the source.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn all_reduce_in_place<'a>(
        &self,
        buffer: &mut Dst<'_>,
        op: impl Into<Reduction<'a>>,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.all_reduce_spans(&buffer.span, &buffer.span, op.into(), stream)
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn all_reduce_spans(
        &self,
        src: &Span,
        dst: &Span,
        op: Reduction<'_>,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclAllReduce" };
        call.length("the destination", dst.count, src.count)?;
        call.pair((src, dst), stream, src.address == dst.address, SAME)?;
        let (op, dtype) = (op.code(self, call.name, src.dtype)?, src.dtype.code());
        let all_reduce = self.nccl().functions().all_reduce;
        // SAFETY: both views hold `count` elements, by what whoever made them promised.
        call.enqueue(stream, |comm, stream| unsafe {
            all_reduce(src.address, dst.address, src.count, dtype, op, comm, stream)
        })
    }

    /// Reduces the elements of all ranks; the rank `root` gets the result, and names a destination.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn reduce<'a>(
        &self,
        src: &Src<'_>,
        dst: Option<&mut Dst<'_>>,
        op: impl Into<Reduction<'a>>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.reduce_spans(&src.span, dst.map(|dst| dst.span), op.into(), root, stream)
    }

    /// [`Self::reduce`] with the result in the place of the root's source.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn reduce_in_place<'a>(
        &self,
        buffer: &mut Dst<'_>,
        op: impl Into<Reduction<'a>>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.reduce_spans(&buffer.span, Some(buffer.span), op.into(), root, stream)
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn reduce_spans(
        &self,
        src: &Span,
        dst: Option<Span>,
        op: Reduction<'_>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclReduce" };
        let dst = call.only_of_root(root, dst, src, src.count)?;
        call.pair((src, &dst), stream, src.address == dst.address, SAME)?;
        let (op, dtype) = (op.code(self, call.name, src.dtype)?, src.dtype.code());
        let reduce = self.nccl().functions().reduce;
        // SAFETY: as in `all_reduce_spans`; only the root's destination is written.
        call.enqueue(stream, |comm, stream| unsafe {
            reduce(src.address, dst.address, src.count, dtype, op, to_int(root), comm, stream)
        })
    }

    /// Gives the elements of the rank `root` to all; it alone names a source, which may be its destination.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn broadcast(
        &self,
        src: Option<&Src<'_>>,
        dst: &mut Dst<'_>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.broadcast_spans(src.map(|src| src.span), &dst.span, root, stream)
    }

    /// [`Self::broadcast`] from and into the same place on every rank.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn broadcast_in_place(
        &self,
        buffer: &mut Dst<'_>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.broadcast_spans(Some(buffer.span), &buffer.span, root, stream)
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn broadcast_spans(
        &self,
        src: Option<Span>,
        dst: &Span,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclBroadcast" };
        let src = call.only_of_root(root, src, dst, dst.count)?;
        call.pair((&src, dst), stream, src.address == dst.address, SAME)?;
        let broadcast = self.nccl().functions().broadcast;
        // SAFETY: as in `all_reduce_spans`; only the root's source is read.
        call.enqueue(stream, |comm, stream| unsafe {
            broadcast(src.address, dst.address, dst.count, dst.dtype.code(), to_int(root), comm, stream)
        })
    }

    /// Puts the elements of all ranks one after the other; every rank gets all. The source may be this rank's part of
    /// the destination.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn all_gather(&self, src: &Src<'_>, dst: &mut Dst<'_>, stream: &Stream<'_>) -> Result<(), Error> {
        self.all_gather_spans(&src.span, &dst.span, stream)
    }

    /// [`Self::all_gather`] of this rank's part of a buffer that holds as many elements of every rank.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn all_gather_in_place(&self, buffer: &mut Dst<'_>, stream: &Stream<'_>) -> Result<(), Error> {
        let own = self.own_part("ncclAllGather", &buffer.span)?;
        self.all_gather_spans(&own, &buffer.span, stream)
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn all_gather_spans(&self, src: &Span, dst: &Span, stream: &Stream<'_>) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclAllGather" };
        call.length("the destination", dst.count, self.times(src.count))?;
        let own = self.own_part(call.name, dst)?;
        call.pair((src, dst), stream, src.address == own.address, OWN_PART_OF_DST)?;
        let all_gather = self.nccl().functions().all_gather;
        // SAFETY: as in `all_reduce_spans`, and the destination holds `count` elements of every rank.
        call.enqueue(stream, |comm, stream| unsafe {
            all_gather(src.address, dst.address, src.count, src.dtype.code(), comm, stream)
        })
    }

    /// Reduces the elements of all ranks; every rank gets its part of the result. The destination may be this rank's
    /// part of the source.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn reduce_scatter<'a>(
        &self,
        src: &Src<'_>,
        dst: &mut Dst<'_>,
        op: impl Into<Reduction<'a>>,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        self.reduce_scatter_spans(&src.span, &dst.span, op.into(), stream)
    }

    /// [`Self::reduce_scatter`] into this rank's part of the source.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn reduce_scatter_in_place<'a>(
        &self,
        buffer: &mut Dst<'_>,
        op: impl Into<Reduction<'a>>,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let own = self.own_part("ncclReduceScatter", &buffer.span)?;
        self.reduce_scatter_spans(&buffer.span, &own, op.into(), stream)
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn reduce_scatter_spans(
        &self,
        src: &Span,
        dst: &Span,
        op: Reduction<'_>,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclReduceScatter" };
        call.length("the source", src.count, self.times(dst.count))?;
        let own = self.own_part(call.name, src)?;
        call.pair((src, dst), stream, dst.address == own.address, OWN_PART_OF_SRC)?;
        let (op, dtype) = (op.code(self, call.name, src.dtype)?, src.dtype.code());
        let reduce_scatter = self.nccl().functions().reduce_scatter;
        // SAFETY: as in `all_reduce_spans`, and the source holds `count` elements for every rank.
        call.enqueue(stream, |comm, stream| unsafe {
            reduce_scatter(src.address, dst.address, dst.count, dtype, op, comm, stream)
        })
    }

    /// Gives each rank its part of this rank's elements, and gets this rank's part of each other's. Before NCCL 2.28
    /// these are sends and receives.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn all_to_all(&self, src: &Src<'_>, dst: &mut Dst<'_>, stream: &Stream<'_>) -> Result<(), Error> {
        let (call, src, dst) = (Call { comm: self, name: "ncclAlltoAll" }, &src.span, &dst.span);
        call.length("the destination", dst.count, src.count)?;
        call.pair((src, dst), stream, false, NEVER)?;
        let count = self.own_part(call.name, src)?.count;
        let Ok((_, all_to_all)) = self.nccl().functions().all_to_all.or_too_old(self.version()) else {
            return self.nccl().group(|| {
                (0..self.size()).try_for_each(|peer| {
                    self.send_span(&part_of(src, peer, count), peer, stream)?;
                    self.recv_span(&part_of(dst, peer, count), peer, stream)
                })
            });
        };
        // SAFETY: as in `all_reduce_spans`, and both hold `count` elements for every rank.
        call.enqueue(stream, |comm, stream| unsafe {
            all_to_all(src.address, dst.address, count, src.dtype.code(), comm, stream)
        })
    }

    /// Puts the elements of all ranks one after the other; the rank `root` gets them, and names a destination. Before
    /// NCCL 2.28 these are sends and receives.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn gather(
        &self,
        src: &Src<'_>,
        dst: Option<&mut Dst<'_>>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let (call, src) = (Call { comm: self, name: "ncclGather" }, &src.span);
        let dst = call.only_of_root(root, dst.map(|dst| dst.span), src, self.times(src.count))?;
        call.pair(
            (src, &dst),
            stream,
            src.address == part_of(&dst, root, src.count).address,
            OWN_PART_OF_DST,
        )?;
        let Ok((_, gather)) = self.nccl().functions().gather.or_too_old(self.version()) else {
            return self.nccl().group(|| {
                self.send_span(src, root, stream)?;
                let of = |peer| self.recv_span(&part_of(&dst, peer, src.count), peer, stream);
                if self.rank() == root { (0..self.size()).try_for_each(of) } else { Ok(()) }
            });
        };
        // SAFETY: as in `all_reduce_spans`; only the root's destination is written, which holds all elements.
        call.enqueue(stream, |comm, stream| unsafe {
            gather(src.address, dst.address, src.count, src.dtype.code(), to_int(root), comm, stream)
        })
    }

    /// Gives each rank its part of the elements of the rank `root`, which names a source. Before NCCL 2.28 these are
    /// sends and receives.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn scatter(
        &self,
        src: Option<&Src<'_>>,
        dst: &mut Dst<'_>,
        root: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let (call, dst) = (Call { comm: self, name: "ncclScatter" }, &dst.span);
        let src = call.only_of_root(root, src.map(|src| src.span), dst, self.times(dst.count))?;
        call.pair(
            (&src, dst),
            stream,
            dst.address == part_of(&src, root, dst.count).address,
            OWN_PART_OF_SRC,
        )?;
        let Ok((_, scatter)) = self.nccl().functions().scatter.or_too_old(self.version()) else {
            return self.nccl().group(|| {
                let to = |peer| self.send_span(&part_of(&src, peer, dst.count), peer, stream);
                if self.rank() == root {
                    (0..self.size()).try_for_each(to)?;
                }
                self.recv_span(dst, root, stream)
            });
        };
        // SAFETY: as in `all_reduce_spans`; only the root's source is read, which holds all elements.
        call.enqueue(stream, |comm, stream| unsafe {
            scatter(src.address, dst.address, dst.count, dst.dtype.code(), to_int(root), comm, stream)
        })
    }

    /// Sends elements to a rank that receives as many. Outside a group, two ranks that send to each other before they
    /// receive may wait for each other for good; [`Self::send_recv`] does not.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn send(&self, src: &Src<'_>, peer: u32, stream: &Stream<'_>) -> Result<(), Error> {
        self.send_span(&src.span, peer, stream)
    }

    /// Receives elements from a rank that sends as many.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn recv(&self, dst: &mut Dst<'_>, peer: u32, stream: &Stream<'_>) -> Result<(), Error> {
        self.recv_span(&dst.span, peer, stream)
    }

    /// Sends to one rank and receives from another, or the same, without waiting for either first.
    ///
    /// # Errors
    ///
    /// As for [`Self::all_reduce`].
    pub fn send_recv(
        &self,
        src: &Src<'_>,
        to: u32,
        dst: &mut Dst<'_>,
        from: u32,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let call = Call { comm: self, name: "a send with a receive" };
        call.overlap(&src.span, &dst.span, false, NEVER)?;
        self.nccl().group(|| {
            self.send_span(&src.span, to, stream)?;
            self.recv_span(&dst.span, from, stream)
        })
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn send_span(&self, src: &Span, peer: u32, stream: &Stream<'_>) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclSend" };
        call.rank(peer)?;
        call.buffer("the source", src, stream)?;
        let send = self.nccl().functions().send;
        // SAFETY: as in `all_reduce_spans`.
        call.enqueue(stream, |comm, stream| unsafe {
            send(src.address, src.count, src.dtype.code(), to_int(peer), comm, stream)
        })
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn recv_span(&self, dst: &Span, peer: u32, stream: &Stream<'_>) -> Result<(), Error> {
        let call = Call { comm: self, name: "ncclRecv" };
        call.rank(peer)?;
        call.buffer("the destination", dst, stream)?;
        let recv = self.nccl().functions().recv;
        // SAFETY: as in `all_reduce_spans`.
        call.enqueue(stream, |comm, stream| unsafe {
            recv(dst.address, dst.count, dst.dtype.code(), to_int(peer), comm, stream)
        })
    }

    fn times(&self, count: usize) -> usize {
        count.saturating_mul(self.size() as usize)
    }

    /// This rank's part of a buffer for all ranks.
    fn own_part(&self, call: &'static str, all: &Span) -> Result<Span, Error> {
        let size = self.size() as usize;
        possible(call, "a buffer for all ranks", all)?;
        if !all.count.is_multiple_of(size) {
            let expected = all.count.next_multiple_of(size);
            return Err(Error::Length { call, what: "a buffer for all ranks", expected, found: all.count });
        }
        Ok(part_of(all, self.rank(), all.count / size))
    }
}

/// What is larger than memory can be would be computed with wrongly.
fn possible(call: &str, what: &str, span: &Span) -> Result<(), Error> {
    if span.can_be() {
        return Ok(());
    }
    Err(Error::Invalid {
        what: format!("{call}: {what} of {} {} is larger than memory", span.count, span.dtype),
    })
}

/// The part of a rank in a buffer with `count` elements of each.
const fn part_of(all: &Span, rank: u32, count: usize) -> Span {
    all.part((rank as usize).wrapping_mul(count), count)
}

/// A call of the library's, and what it is for.
pub(crate) struct Call<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) name: &'static str,
}

impl Call<'_> {
    /// Puts work in a stream.
    pub(crate) fn enqueue(
        &self,
        stream: &Stream<'_>,
        call: impl FnOnce(Comm, sys::Stream) -> c_int,
    ) -> Result<(), Error> {
        if stream.is_per_thread() && !self.comm.is_blocking() {
            return Err(Error::PerThreadStream);
        }
        self.device("the stream", stream.device)?;
        group::note(self.comm.shared())?;
        self.comm.shared().call(self.name, |comm| call(comm, stream.raw))
    }

    pub(crate) fn rank(&self, rank: u32) -> Result<(), Error> {
        let size = self.comm.size();
        if rank < size { Ok(()) } else { Err(Error::Rank { rank, size }) }
    }

    pub(crate) fn buffer(&self, what: &'static str, span: &Span, stream: &Stream<'_>) -> Result<(), Error> {
        span.dtype.check(self.comm.version())?;
        possible(self.name, what, span)?;
        if span.stream.is_some_and(|own| own != stream.raw) {
            return Err(Error::WrongStream { call: self.name, what });
        }
        self.device(what, span.device)
    }

    fn device(&self, what: &'static str, device: Option<u32>) -> Result<(), Error> {
        let expected = self.comm.device();
        match device {
            Some(found) if found != expected => {
                Err(Error::WrongDevice { call: self.name, what, expected, found })
            }
            _ => Ok(()),
        }
    }

    fn length(&self, what: &'static str, found: usize, expected: usize) -> Result<(), Error> {
        if found == expected {
            return Ok(());
        }
        Err(Error::Length { call: self.name, what, expected, found })
    }

    /// Checks a source and a destination, which may share memory in one way.
    fn pair(
        &self,
        (src, dst): (&Span, &Span),
        stream: &Stream<'_>,
        is_in_place: bool,
        rule: &'static str,
    ) -> Result<(), Error> {
        if src.dtype != dst.dtype {
            return Err(Error::Types { call: self.name, one: src.dtype, other: dst.dtype });
        }
        self.buffer("the source", src, stream)?;
        self.buffer("the destination", dst, stream)?;
        self.overlap(src, dst, is_in_place, rule)
    }

    fn overlap(&self, src: &Span, dst: &Span, is_in_place: bool, rule: &'static str) -> Result<(), Error> {
        if src.overlaps(dst) && !is_in_place {
            return Err(Error::Overlap { call: self.name, rule });
        }
        Ok(())
    }

    /// The buffer that the root alone needs, of `count` elements; elsewhere an empty one that fits to the other.
    fn only_of_root(&self, root: u32, span: Option<Span>, other: &Span, count: usize) -> Result<Span, Error> {
        self.rank(root)?;
        if self.comm.rank() != root {
            // The library takes no address of no memory; this one it does not use.
            return Ok(Span { count: 0, ..*other });
        }
        let Some(span) = span else {
            return Err(Error::Invalid {
                what: format!("{}: the root names a buffer of its own", self.name),
            });
        };
        self.length("the root's buffer", span.count, count)?;
        Ok(span)
    }
}
