//! Groups: calls that the library takes as one.

use std::{cell::RefCell, ffi::c_int, ptr, sync::Arc};

use smallvec::SmallVec;

use crate::{
    error::Error,
    library::Nccl,
    shared::{Shared, is_refusal},
    sys::IN_PROGRESS,
};

/// An open group: what its end is for.
struct Group {
    nccl: Nccl,
    /// Communicators that its calls were for.
    used: SmallVec<[Arc<Shared>; 8]>,
    /// Communicators that were dropped meanwhile: the library may still know their addresses.
    dropped: Vec<Arc<Shared>>,
}

thread_local! {
    /// This thread's open group, if there is one.
    static OPEN: RefCell<Option<Group>> = const { RefCell::new(None) };
}

impl Nccl {
    /// Makes the calls in a closure as one: sends and receives among them do not wait for each other, and a thread can
    /// make the calls of several ranks. Nothing begins before the closure returns. A group in a group is a part of it.
    ///
    /// If the closure fails, what it called before is begun all the same: the library cannot take it back. Until the
    /// group is over its communicators cannot be finalized or aborted; those that are dropped in it part at its end.
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
        if let Some(is_ours) = with_open(|group| group.nccl.is_same_library(self)) {
            return if is_ours { calls() } else { Err(of_another_library()) };
        }
        // SAFETY: the call takes nothing; the group is ended below or by the guard.
        self.check("ncclGroupStart", unsafe { (self.functions().group_start)() })?;
        OPEN.set(Some(Group { nccl: self.clone(), used: SmallVec::new(), dropped: Vec::new() }));
        let open = Open { nccl: self };
        let called = calls();
        let ended = open.end();
        let called = called?;
        ended.map(|()| called)
    }
}

/// This thread's open group, if there is one. A thread that ends, and drops what it has kept, has none.
fn with_open<T>(look: impl FnOnce(&mut Group) -> T) -> Option<T> {
    OPEN.try_with(|open| open.borrow_mut().as_mut().map(look)).ok().flatten()
}

/// Whether this thread is in a group.
pub(crate) fn is_open() -> bool {
    with_open(|_| ()).is_some()
}

/// Whether this thread is in a group that a communicator is used in.
pub(crate) fn holds(shared: &Shared) -> bool {
    with_open(|group| group.used.iter().any(|used| ptr::eq(&raw const **used, shared))).unwrap_or_default()
}

/// What waits for other ranks, or gives a communicator back, cannot be put off to the end of a group.
pub(crate) fn outside(call: &str) -> Result<(), Error> {
    if is_open() {
        return Err(Error::Invalid { what: format!("{call} cannot be called in a group") });
    }
    Ok(())
}

/// Takes note of a communicator that a call is for.
pub(crate) fn note(shared: &Arc<Shared>) -> Result<(), Error> {
    let note = |group: &mut Group| {
        if group.used.iter().any(|known| Arc::ptr_eq(known, shared)) {
            return Ok(());
        }
        if !group.nccl.is_same_library(&shared.nccl) {
            return Err(of_another_library());
        }
        shared.enter_group()?;
        group.used.push(Arc::clone(shared));
        Ok(())
    };
    with_open(note).unwrap_or(Ok(()))
}

/// Leaves a communicator that is dropped in a group to the group's end; whether there is one.
pub(crate) fn put_off(shared: &Arc<Shared>) -> bool {
    with_open(|group| group.dropped.push(Arc::clone(shared))).is_some()
}

fn of_another_library() -> Error {
    Error::Invalid { what: "a call of one NCCL cannot be in a group of another".to_owned() }
}

/// An open group, which a panic ends too.
struct Open<'a> {
    nccl: &'a Nccl,
}

/// What a group leaves behind. Communicators that were dropped in it part when it is dropped.
#[derive(Default)]
struct Ended {
    used: SmallVec<[Arc<Shared>; 8]>,
    dropped: Vec<Arc<Shared>>,
}

impl Open<'_> {
    fn end(self) -> Result<(), Error> {
        let (ended, code) = self.close();
        let (name, nccl) = ("ncclGroupEnd", self.nccl);
        std::mem::forget(self);
        if is_refusal(code) {
            let first = ended.used.first().map(|first| first.error(name, code));
            return Err(first.unwrap_or_else(|| nccl.error(name, code, ptr::null_mut()).into()));
        }
        if code == IN_PROGRESS {
            return ended.used.iter().try_for_each(|shared| shared.settle(name, code));
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn close(&self) -> (Ended, c_int) {
        let open = OPEN.try_with(RefCell::take).ok().flatten();
        let mut ended =
            open.map_or_else(Ended::default, |open| Ended { used: open.used, dropped: open.dropped });
        // In one order in all threads, so that two groups do not wait for each other.
        ended.used.sort_unstable_by_key(Arc::as_ptr);
        // The end works on the communicators, so nobody else may. One that cannot be had in time is in a call that
        // another thread is left behind in; the group has to be ended all the same.
        let locks: SmallVec<[_; 8]> = ended.used.iter().map(|shared| shared.lock()).collect();
        // SAFETY: the call takes nothing; the group was begun by this thread and is ended once. Its communicators
        // live, since nobody gives one back that is in a group.
        let code = unsafe { (self.nccl.functions().group_end)() };
        drop(locks);
        ended.used.iter().for_each(|shared| shared.leave_group());
        (ended, code)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // The panic tells more than a code.
        let _ended = self.close();
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        for shared in &self.dropped {
            // As in the drop of a communicator.
            let _parted = shared.part();
        }
    }
}
