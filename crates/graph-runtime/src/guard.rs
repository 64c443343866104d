//! Bytes in the hands of the host, for a while.

use std::{fmt, sync::Arc};

use warpweft_core_types::{BufferView, Deadline, RangeError, WaitError};

use crate::{
    domain::Domain,
    error::MapError,
    memory::{Bytes, LeaseKind},
    submit::{Points, add_point},
    task::part,
    usage::Usage,
};

/// What the name of an operand is in errors about guards.
const NAME: &str = "guard";

/// A range lent to one holder. Work that uses it is refused until this is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    domain: Arc<Domain>,
    bytes: Bytes,
    id: u64,
    /// Keeps its memory known until the lease has ended.
    view: BufferView,
}

impl Lease {
    /// Lends a range, once work that uses it has ended, and other holders have gone.
    pub(crate) fn take(
        domain: &Arc<Domain>,
        view: &BufferView,
        kind: LeaseKind,
        deadline: Deadline,
    ) -> Result<Self, MapError> {
        let usage = usage_of(kind);
        let bytes = domain.bytes_of(view, NAME)?;
        // First the lease, so that no later work gets in between; then the wait for earlier work.
        let lease = Self::announce(domain, (view, bytes), kind, deadline)?;
        lease.wait_for_users(usage, deadline)?;
        match domain.state().memories.at(lease.bytes.memory).poison_in(&lease.bytes.range, (u64::MAX, 0)) {
            Some(poison) if usage.reads() => Err(MapError::Poisoned { poison }),
            _ => Ok(lease),
        }
    }

    fn announce(
        domain: &Arc<Domain>,
        (view, bytes): (&BufferView, Bytes),
        kind: LeaseKind,
        deadline: Deadline,
    ) -> Result<Self, MapError> {
        let mut state = domain.state();
        while let Some(reason) = state.memories.at(bytes.memory).holder(&bytes.range, usage_of(kind)) {
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return Err(MapError::Busy { reason });
            }
            state = domain.wait_for_change(state, remaining);
        }
        let id = state.memories.lease(&bytes, kind);
        drop(state);
        Ok(Self { domain: Arc::clone(domain), bytes, id, view: view.clone() })
    }

    /// Waits until nothing uses the range. Later work is refused, so what there is gets less.
    fn wait_for_users(&self, usage: Usage, deadline: Deadline) -> Result<(), MapError> {
        loop {
            let mut state = self.domain.state();
            let mut points = Points::new();
            let memory = state.memories.at(self.bytes.memory);
            memory.users.conflicts(self.bytes.range.clone(), usage, |point| add_point(&mut points, point));
            points.retain(|point| !state.line(*point).is_past(point.value));
            let Some(&first) = points.first() else { return Ok(()) };
            let waits = state.semaphores(&points, u32::MAX);
            drop(state);
            let Some(wait) = waits.first() else { return Ok(()) };
            match wait.wait(deadline) {
                Ok(()) => {}
                Err(WaitError::Timeout { .. }) => return Err(MapError::Timeout),
                Err(_) => {
                    let mut state = self.domain.state();
                    if state.line(first).semaphore.failure().is_some() {
                        self.domain.settle(&mut state);
                    }
                }
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.domain.state().memories.end_lease(self.bytes.memory, self.id);
        self.domain.changed.notify_all();
    }
}

const fn usage_of(kind: LeaseKind) -> Usage {
    match kind {
        LeaseKind::Read => Usage::Read,
        // The host may write a part alone.
        LeaseKind::Write | LeaseKind::HandOff => Usage::ReadWrite,
    }
}

/// Bytes that the host reads. Work that would write them is refused meanwhile.
///
/// Bytes are copied out, and no reference to them exists: devices may have the same memory mapped.
pub struct ReadGuard(Lease);

/// Bytes that the host writes. Work that uses them is refused meanwhile.
pub struct WriteGuard(Lease);

impl ReadGuard {
    pub(crate) fn new(domain: &Arc<Domain>, view: &BufferView, deadline: Deadline) -> Result<Self, MapError> {
        check_visible(view)?;
        Lease::take(domain, view, LeaseKind::Read, deadline).map(Self)
    }

    /// The length in bytes.
    pub const fn size(&self) -> u64 {
        self.0.view.size()
    }

    /// Copies bytes from `offset` on into `into`.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RangeError> {
        part(&self.0.view, offset, into.len())?.map_or(Ok(()), |view| view.read(into))
    }

    /// All bytes.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`] where they are more than the host can address.
    pub fn to_vec(&self) -> Result<Vec<u8>, RangeError> {
        let mut bytes = vec![0; usize::try_from(self.size()).unwrap_or(usize::MAX)];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

impl WriteGuard {
    pub(crate) fn new(domain: &Arc<Domain>, view: &BufferView, deadline: Deadline) -> Result<Self, MapError> {
        check_visible(view)?;
        Lease::take(domain, view, LeaseKind::Write, deadline).map(Self)
    }

    /// The length in bytes.
    pub const fn size(&self) -> u64 {
        self.0.view.size()
    }

    /// Copies bytes from `offset` on into `into`.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RangeError> {
        part(&self.0.view, offset, into.len())?.map_or(Ok(()), |view| view.read(into))
    }

    /// Copies `from` to the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`].
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), RangeError> {
        part(&self.0.view, offset, from.len())?.map_or(Ok(()), |view| view.write(from))
    }
}

fn check_visible(view: &BufferView) -> Result<(), RangeError> {
    if view.buffer().kind().is_host_visible() {
        return Ok(());
    }
    Err(RangeError::NotHostVisible { device: view.device() })
}

impl fmt::Debug for ReadGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadGuard({:?})", self.0.view)
    }
}

impl fmt::Debug for WriteGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteGuard({:?})", self.0.view)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::time::Duration;

    use loom::{sync::atomic::AtomicUsize, thread};
    use warpweft_core_types::{Buffer, DeviceId, DeviceUuid, HostMapping, MemoryKind};

    use super::*;
    use crate::{memory::Point, submit::Points, sync::Ordering};

    const LATER: Duration = Duration::from_secs(600);

    /// Memory that nobody looks at.
    #[derive(Debug)]
    struct Memory;

    impl Buffer for Memory {
        fn device(&self) -> DeviceId {
            DeviceId { backend: "host", ordinal: 0, uuid: DeviceUuid::from_bytes([0; 16]) }
        }

        fn size(&self) -> u64 {
            64
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::HostVisible
        }

        fn mapping(&self) -> Option<HostMapping<'_>> {
            None
        }
    }

    /// A domain with one memory, and how many use it: any number of readers, or one writer.
    #[derive(Clone)]
    struct Shared {
        domain: Arc<Domain>,
        view: BufferView,
        memory: u32,
        users: Arc<AtomicUsize>,
    }

    /// More than there are readers.
    const WRITER: usize = 100;

    impl Shared {
        fn new() -> Self {
            let domain = Domain::without_devices();
            let view = BufferView::whole(Arc::new(Memory));
            let (memory, _) = domain.state().memories.find(view.buffer()).unwrap();
            Self { domain, view, memory, users: Arc::default() }
        }

        fn bytes(&self) -> Bytes {
            Bytes { memory: self.memory, range: 0..64 }
        }

        fn lend(&self, kind: LeaseKind) -> Lease {
            let deadline = Deadline::within(LATER);
            Lease::announce(&self.domain, (&self.view, self.bytes()), kind, deadline).unwrap()
        }

        /// Uses the memory while a lease of it is held.
        fn hold(&self, kind: LeaseKind) {
            let lease = self.lend(kind);
            let weight = if kind == LeaseKind::Read { 1 } else { WRITER };
            // Relaxed: the lock of the leases orders all of it.
            let others = self.users.fetch_add(weight, Ordering::Relaxed);
            assert!(others == 0 || (kind == LeaseKind::Read && others < WRITER), "{others} beside {kind:?}");
            self.users.fetch_sub(weight, Ordering::Relaxed);
            drop(lease);
        }

        /// Whether a submission that writes is taken, as `Domain::admit` decides: then it is noted.
        fn submit(&self) -> bool {
            let mut state = self.domain.state();
            let memory = state.memories.at(self.memory);
            let taken = memory.holder(&(0..64), Usage::Write).is_none();
            if taken {
                let point = Point { line: 0, value: 1 };
                memory.users.add(0..64, Usage::Write, point, &mut crate::memory::Unordered);
            }
            taken
        }

        fn users_before(&self) -> usize {
            let mut state = self.domain.state();
            let mut points = Points::new();
            let memory = state.memories.at(self.memory);
            memory.users.conflicts(0..64, Usage::Read, |point| add_point(&mut points, point));
            points.len()
        }
    }

    /// Nobody is beside a writer, and nobody sleeps for good.
    fn check(kinds: [LeaseKind; 2]) {
        loom::model(move || {
            let shared = Shared::new();
            let other = shared.clone();
            let thread = thread::spawn(move || other.hold(kinds[0]));
            shared.hold(kinds[1]);
            thread.join().unwrap();
        });
    }

    #[test]
    fn loom_writers_take_turns() {
        check([LeaseKind::Write, LeaseKind::Write]);
        check([LeaseKind::HandOff, LeaseKind::Write]);
    }

    #[test]
    fn loom_readers_and_writers_take_turns() {
        check([LeaseKind::Read, LeaseKind::Write]);
        check([LeaseKind::Read, LeaseKind::Read]);
    }

    /// Work is either found by the lease, which waits for it, or refused because of the lease.
    #[test]
    fn loom_no_submission_gets_between_a_lease_and_its_wait() {
        loom::model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            let thread = thread::spawn(move || other.submit());
            let lease = shared.lend(LeaseKind::Read);
            let found = shared.users_before();
            let taken = thread.join().unwrap();
            assert_eq!(taken, found == 1, "found {found}");
            assert_eq!(shared.users_before(), found, "the lease lasts");
            drop(lease);
            assert!(shared.submit(), "the lease is over");
        });
    }
}
