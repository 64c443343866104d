//! Calls that a driver may make wait for what runs, and the residents that have to let them through.
//!
//! Mesa 25 creates and destroys pipelines only between two submissions. A resident is batch after batch, so such
//! calls get through; one that does not return would hold them up for good. So each resident first shows that it
//! returns, or the call is not made.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use warpweft_core_types::Deadline;

use crate::resident::ResidentCore;

/// A resident that ends no batch for this long keeps calls that would wait for it from being made.
const PATIENCE: Duration = Duration::from_secs(1);

/// A device's residents, and how many want them to give way.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    ways: Arc<AtomicU32>,
    residents: Mutex<Vec<Weak<ResidentCore>>>,
}

/// A resident that does not return.
#[derive(Debug)]
pub(crate) struct Unparkable {
    pub(crate) kernel: String,
    pub(crate) workgroup: u32,
}

impl Gate {
    pub(crate) fn add(&self, resident: &Arc<ResidentCore>) {
        let mut residents = self.residents();
        residents.retain(|known| known.strong_count() > 0);
        residents.push(Arc::downgrade(resident));
    }

    /// Has residents make short batches.
    pub(crate) fn open(&self) -> Way {
        // Relaxed, here and below: a hint that orders nothing.
        self.ways.fetch_add(1, Ordering::Relaxed);
        Way(Arc::clone(&self.ways))
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.ways.load(Ordering::Relaxed) > 0
    }

    /// Returns once each resident has shown that it returns: a call that waits for what runs may be made.
    pub(crate) fn pass(&self) -> Result<Way, Unparkable> {
        let way = self.open();
        let residents: Vec<_> = self.residents().iter().filter_map(Weak::upgrade).collect();
        let before: Vec<u64> = residents.iter().map(|resident| resident.batches()).collect();
        let deadline = Deadline::within(PATIENCE);
        let mut pairs = residents.iter().zip(before);
        pairs.try_for_each(|(resident, before)| resident.wait_for_boundary(before, deadline))?;
        Ok(way)
    }

    fn residents(&self) -> MutexGuard<'_, Vec<Weak<ResidentCore>>> {
        // Nothing of others runs under the lock.
        self.residents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While it lives, residents make short batches.
#[derive(Debug)]
pub(crate) struct Way(Arc<AtomicU32>);

impl Drop for Way {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
