//! One-sided calls: put data in another rank's window, and signal.

use std::ffi::c_int;

use crate::{
    collectives::Call,
    communicator::{Communicator, to_int},
    error::Error,
    memory::Src,
    stream::Stream,
    sys::WaitSignalDesc,
    window::Window,
};

/// The signal and the context that there always are.
const FIRST: c_int = 0;

/// So many signals of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalWait {
    /// Who signals.
    pub peer: u32,
    /// How often, since this rank last waited for it.
    pub count: u32,
}

impl Communicator {
    /// Puts elements in a peer's window, `offset_bytes` from its beginning, and signals the peer once they are there
    /// (NCCL 2.29). The peer waits with [`Self::wait_signals`] and does nothing else.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`]; [`Error::Length`] if the window does not hold them; else as for [`Self::all_reduce`].
    ///
    /// # Safety
    ///
    /// - The peer's window is as large as this one, and both stay until the work is over.
    /// - Until the signal is there, nobody else reads or writes that part of the peer's window.
    #[expect(unsafe_code, reason = "calls the library")]
    pub unsafe fn put_signal(
        &self,
        src: &Src<'_>,
        peer: u32,
        window: &Window,
        offset_bytes: usize,
        stream: &Stream<'_>,
    ) -> Result<(), Error> {
        let (name, put) = self.nccl().functions().put_signal.or_too_old(self.version())?;
        let call = Call { comm: self, name };
        let src = &src.span;
        call.rank(peer)?;
        call.buffer("the source", src, stream)?;
        if !window.is_of(self) {
            return Err(Error::Invalid { what: format!("{name}: the window is another communicator's") });
        }
        let expected = src.size_bytes().saturating_add(offset_bytes);
        if expected > window.size_bytes() {
            let (what, found) = ("the peer's window, in bytes,", window.size_bytes());
            return Err(Error::Length { call: name, what, expected, found });
        }
        let (count, dtype, to) = (src.count, src.dtype.code(), to_int(peer));
        // SAFETY: the view holds `count` elements, by what whoever made it promised; the peer's window is the caller's
        // duty.
        call.enqueue(stream, |comm, stream| unsafe {
            put(src.address, count, dtype, to, window.raw(), offset_bytes, FIRST, FIRST, 0, comm, stream)
        })
    }

    /// Signals a peer (NCCL 2.29).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`]; else as for [`Self::all_reduce`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn signal(&self, peer: u32, stream: &Stream<'_>) -> Result<(), Error> {
        let (name, signal) = self.nccl().functions().signal.or_too_old(self.version())?;
        let call = Call { comm: self, name };
        call.rank(peer)?;
        // SAFETY: the communicator is live; there are no flags.
        call.enqueue(stream, |comm, stream| unsafe { signal(to_int(peer), FIRST, FIRST, 0, comm, stream) })
    }

    /// Holds the stream until peers have signalled (NCCL 2.29).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`]; else as for [`Self::all_reduce`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn wait_signals(&self, waits: &[SignalWait], stream: &Stream<'_>) -> Result<(), Error> {
        let (name, wait) = self.nccl().functions().wait_signal.or_too_old(self.version())?;
        let call = Call { comm: self, name };
        waits.iter().try_for_each(|wait| call.rank(wait.peer))?;
        let many = |count: usize| Error::Invalid {
            what: format!("{name}: {count} are more than can be waited for"),
        };
        let desc = |wait: &SignalWait| {
            let operations = c_int::try_from(wait.count).map_err(|_| many(wait.count as usize))?;
            Ok(WaitSignalDesc { operations, peer: to_int(wait.peer), signal: FIRST, context: FIRST })
        };
        let mut descs = waits.iter().map(desc).collect::<Result<Vec<_>, Error>>()?;
        let count = c_int::try_from(descs.len()).map_err(|_| many(descs.len()))?;
        // SAFETY: the communicator is live; the list holds `count` entries, which are read before the call returns.
        call.enqueue(stream, |comm, stream| unsafe { wait(count, descs.as_mut_ptr(), comm, stream) })
    }
}
