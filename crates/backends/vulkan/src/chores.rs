//! A thread of a device's that can stand a wait.
//!
//! Some drivers wait for running work where pipelines are destroyed (Mesa 25 does), and a device that goes waits for
//! its last work. Whoever lets such a thing go may be the thread that others wait for, or have a deadline.

use std::{
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{self, Sender},
    },
    thread,
};

use warpweft_core_types::DeviceId;

use crate::device::VulkanDevice;

type Job = Box<dyn FnOnce() + Send>;

/// Jobs for the thread. It ends once this and its clones are gone and they are done; nobody waits for that.
#[derive(Clone)]
pub(crate) struct Chores(Sender<Job>);

impl Chores {
    pub(crate) fn start(device: DeviceId) -> io::Result<Self> {
        let (jobs, taken) = mpsc::channel::<Job>();
        let run = move || {
            for job in taken {
                // What is let go may be a program's own, whose panic must not keep the rest.
                if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
                    // Dropping a payload may panic as well.
                    std::mem::forget(payload);
                }
            }
        };
        thread::Builder::new().name(format!("{device}/chores")).spawn(run)?;
        Ok(Self(jobs))
    }

    /// Has the thread do it, after what it was given before.
    pub(crate) fn give(&self, job: impl FnOnce() + Send + 'static) {
        // The thread lives as long as `self`, so there is somebody to take it.
        let _taken = self.0.send(Box::new(job));
    }
}

impl fmt::Debug for Chores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Chores")
    }
}

/// Keeps a device open: what is opened again is the same device while anything of it is there.
///
/// A device that goes with it goes on its own thread, wherever this is dropped.
pub(crate) struct Hold(Option<Arc<VulkanDevice>>);

impl Hold {
    pub(crate) const fn new(device: Arc<VulkanDevice>) -> Self {
        Self(Some(device))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Some(last) = self.0.take().and_then(Arc::into_inner) else { return };
        let chores = last.gpu().chores.clone();
        chores.give(move || drop(last));
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}
