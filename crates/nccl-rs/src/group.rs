//! Groups: calls that the library takes as one.

use std::{cell::RefCell, ptr, sync::Arc};

use smallvec::SmallVec;

use crate::{
    communicator::{Shared, is_refusal},
    error::Error,
    library::Nccl,
    sys::IN_PROGRESS,
};

type Used = SmallVec<[Arc<Shared>; 8]>;

thread_local! {
    /// Communicators that calls of this thread's open group were for, if there is one.
    static OPEN: RefCell<Option<Used>> = const { RefCell::new(None) };
}

impl Nccl {
    /// Makes the calls in a closure as one: sends and receives among them do not wait for each other, and a thread can
    /// make the calls of several ranks. Nothing begins before the closure returns. A group in a group is a part of it.
    ///
    /// If the closure fails, what it called before is begun all the same: the library cannot take it back.
    ///
    /// ```no_run
    /// # use nccl_rs::{Communicator, Dst, Error, Src, Stream};
    /// /// Everyone gets what the previous rank has.
    /// fn shift(comm: &Communicator, src: &Src<'_>, dst: &mut Dst<'_>, stream: &Stream<'_>) -> Result<(), Error> {
    ///     let (rank, size) = (comm.rank(), comm.size());
    ///     comm.nccl().group(|| {
    ///         comm.send(src, (rank + 1) % size, stream)?;
    ///         comm.recv(dst, (rank + size - 1) % size, stream)
    ///     })
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// The closure's, or else what the calls together lead to.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn group<T>(&self, calls: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.check_process()?;
        if is_open() {
            return calls();
        }
        // SAFETY: the call takes nothing; the group is ended below or by the guard.
        self.check("ncclGroupStart", unsafe { (self.functions().group_start)() })?;
        OPEN.set(Some(Used::new()));
        let open = Open { nccl: self };
        let called = calls();
        let ended = open.end();
        let called = called?;
        ended.map(|()| called)
    }
}

/// Whether this thread is in a group.
pub(crate) fn is_open() -> bool {
    OPEN.with_borrow(Option::is_some)
}

/// Takes note of a communicator that a call is for.
pub(crate) fn note(shared: &Arc<Shared>) {
    OPEN.with_borrow_mut(|open| {
        if let Some(used) = open
            && !used.iter().any(|known| Arc::ptr_eq(known, shared))
        {
            used.push(Arc::clone(shared));
        }
    });
}

/// An open group, which a panic ends too.
struct Open<'a> {
    nccl: &'a Nccl,
}

impl Open<'_> {
    fn end(self) -> Result<(), Error> {
        let (used, code) = self.close();
        let (name, nccl) = ("ncclGroupEnd", self.nccl);
        std::mem::forget(self);
        if is_refusal(code) {
            let first = used.first().map(|first| first.error(name, code));
            return Err(first.unwrap_or_else(|| nccl.error(name, code, ptr::null_mut()).into()));
        }
        if code == IN_PROGRESS {
            return used.iter().try_for_each(|shared| shared.settle(name, code));
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn close(&self) -> (Used, i32) {
        let used = OPEN.take().unwrap_or_default();
        // SAFETY: the call takes nothing; the group was begun by this thread and is ended once.
        (used, unsafe { (self.nccl.functions().group_end)() })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // The panic tells more than a code.
        let _ended = self.close();
    }
}
