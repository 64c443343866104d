//! Streams and events of one context.

use std::{
    any::Any,
    fmt, hint,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys::{CUevent_flags, CUevent_st, CUstream_flags, CUstream_st};
use warpweft_core_types::DriverError;

use crate::{
    context::Context,
    driver::{Handle, created},
};

/// A stream: one of our own, which is non-blocking and never waits for the legacy default stream, or one that
/// another library made.
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
    raw: Handle<CUstream_st>,
    origin: Origin,
}

/// Who destroys a stream.
enum Origin {
    Own,
    Foreign { _owner: Arc<dyn Any + Send + Sync> },
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own => "Own",
            Self::Foreign { .. } => "Foreign",
        })
    }
}

impl Stream {
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        let _current = context.enter()?;
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the result is written to `raw`.
        let raw = created("cuStreamCreate", |raw| unsafe { context.driver.stream_create(raw, flags) })?;
        Ok(Self { context: Arc::clone(context), raw, origin: Origin::Own })
    }

    /// A stream of another library, which `owner` keeps alive.
    pub(crate) fn foreign(
        context: &Arc<Context>,
        raw: Handle<CUstream_st>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { context: Arc::clone(context), raw, origin: Origin::Foreign { _owner: owner } }
    }

    pub(crate) const fn raw(&self) -> *mut CUstream_st {
        self.raw.raw()
    }

    /// Whether another library made it.
    pub(crate) const fn is_foreign(&self) -> bool {
        matches!(self.origin, Origin::Foreign { .. })
    }

    /// Whether everything in it is over. The context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn is_done(&self) -> Result<bool, DriverError> {
        // SAFETY: the stream is live.
        unsafe { self.context.driver.stream_is_done(self.raw()) }
    }

    /// Lets what is enqueued from here on wait for what `event` stands for now. Its context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), DriverError> {
        // SAFETY: both handles are live; the driver notes the event's present work, so that recording it
        // again later changes nothing here.
        unsafe { self.context.driver.stream_wait_event(self.raw(), event.raw.raw(), 0) }
    }
}

impl Drop for Stream {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Origin::Own = self.origin else { return };
        // A context that cannot be entered is lost, and its streams with it.
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: created by `create`, destroyed once. Work that is enqueued still runs; whatever it
        // touches is kept alive by the records of that work, not by the stream.
        let _destroyed = unsafe { self.context.driver.stream_destroy(self.raw()) };
    }
}

/// A mark in a stream. It is recorded by its only owner, then shared.
#[derive(Debug)]
pub(crate) struct Event {
    context: Arc<Context>,
    raw: Handle<CUevent_st>,
}

impl Event {
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        let _current = context.enter()?;
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; the result is written to `raw`.
        let raw = created("cuEventCreate", |raw| unsafe { context.driver.event_create(raw, flags) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    pub(crate) const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Marks the end of what is in `stream` now. Its context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: both handles are live and of one context.
        unsafe { self.context.driver.event_record(self.raw.raw(), stream.raw()) }
    }

    /// Whether the marked work is over. A context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn is_done(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is live.
        unsafe { self.context.driver.event_is_done(self.raw.raw()) }
    }

    /// Spins until the marked work is over, for at most `limit`; whether it is. A context is current.
    pub(crate) fn wait(&self, limit: Duration) -> Result<bool, DriverError> {
        let start = Instant::now();
        loop {
            if self.is_done()? {
                return Ok(true);
            }
            match start.elapsed() {
                past if past >= limit => return Ok(false),
                past if past >= SPIN => thread::yield_now(),
                _ => hint::spin_loop(),
            }
        }
    }
}

impl Drop for Event {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: created by `create`, destroyed once; waits that were enqueued on it stay valid.
        let _destroyed = unsafe { self.context.driver.event_destroy(self.raw.raw()) };
    }
}

/// How long a wait keeps its core to itself before it lets others have it in between.
const SPIN: Duration = Duration::from_micros(50);
