//! Ranks in threads, and buffers that are vectors.

use std::{thread, time::Duration};

use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, Dst, Element, Error, Nccl, Src, Stream};
use warpweft_stand_in_nccl::{StandIn, Stream as StandInStream};

/// Longer than anything here takes.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) library: StandIn,
    pub(crate) nccl: Nccl,
}

/// A rank and a stream of its own.
pub(crate) struct Rank<'a> {
    pub(crate) comm: Communicator,
    stream: StandInStream<'a>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::over(StandIn::load().unwrap())
    }

    pub(crate) fn over(library: StandIn) -> Self {
        let nccl = Nccl::load_from(library.path()).unwrap();
        Self { library, nccl }
    }

    /// Runs each rank in a thread; what they return, in the order of ranks.
    pub(crate) fn ranks<T: Send>(
        &self,
        size: u32,
        config: &CommunicatorConfig,
        body: impl Fn(Rank<'_>) -> T + Sync,
    ) -> Vec<T> {
        let id = self.nccl.unique_id().unwrap();
        self.threads(size, |rank| {
            let desc = CommunicatorDesc::new(id, rank, size).config(config.clone());
            body(self.rank(Communicator::init(&self.nccl, &desc).unwrap()))
        })
    }

    pub(crate) fn rank(&self, comm: Communicator) -> Rank<'_> {
        Rank { comm, stream: self.library.stream() }
    }

    pub(crate) fn threads<T: Send>(&self, count: u32, body: impl Fn(u32) -> T + Sync) -> Vec<T> {
        let body = &body;
        thread::scope(|scope| {
            let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || body(number))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

impl Rank<'_> {
    #[expect(unsafe_code, reason = "makes a stream of a handle")]
    pub(crate) fn stream(&self) -> Stream<'_> {
        // SAFETY: the stream lives for as long as this borrow, and the stand-in knows no devices.
        unsafe { Stream::from_raw(self.stream.raw()) }
    }

    /// Takes the communicator out, for whoever ends it, and keeps another.
    pub(crate) fn replace_communicator(&mut self, other: Result<Communicator, Error>) -> Communicator {
        std::mem::replace(&mut self.comm, other.unwrap())
    }

    /// Waits until the stream has done everything.
    pub(crate) fn synchronize(&self) {
        assert!(self.stream.synchronize(LIMIT), "the stream did not end");
    }

    /// Drops the communicator and waits for the stream.
    pub(crate) fn drop_communicator(self) {
        drop(self.comm);
        assert!(self.stream.synchronize(LIMIT), "the stream did not end");
    }

    /// Whether the stream has done everything.
    pub(crate) fn is_idle(&self) -> bool {
        self.stream.synchronize(Duration::ZERO)
    }
}

/// Elements of a test, which outlive the streams that use them.
#[expect(unsafe_code, reason = "makes a view of a slice")]
pub(crate) fn src<T: Element>(elements: &[T]) -> Src<'_> {
    // SAFETY: every test waits for its stream before its elements go, and writes none of them meanwhile.
    unsafe { Src::new(elements.as_ptr().cast_mut().cast(), elements.len(), T::TYPE) }
}

#[expect(unsafe_code, reason = "makes a view of a slice")]
pub(crate) fn dst<T: Element>(elements: &mut [T]) -> Dst<'_> {
    // SAFETY: as in `src`, and reads none of them meanwhile.
    unsafe { Dst::new(elements.as_mut_ptr().cast(), elements.len(), T::TYPE) }
}
