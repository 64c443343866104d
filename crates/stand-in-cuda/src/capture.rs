//! Capturing: work that goes into a stream becomes nodes of a graph and does not run.

use std::{
    cell::Cell,
    ffi::c_int,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
};

use crate::{
    context::current,
    exports::{Code, Outcome, Raw, exports},
    graph::Graph,
    machine::{Machine, running},
    stream::Stream,
    task::Task,
};

/// A capture under way, in one stream.
#[derive(Debug)]
pub(crate) struct Capture {
    graph: Arc<Graph>,
    /// Positions of the nodes that the next one comes behind.
    last: Mutex<Vec<usize>>,
    thread: ThreadId,
    mode: Mode,
    is_invalid: AtomicBool,
}

/// Whose calls may end a capture: `CUstreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl Mode {
    fn of(mode: c_int) -> Result<Self, Code> {
        match mode {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    const fn code(self) -> c_int {
        match self {
            Self::Global => 0,
            Self::ThreadLocal => 1,
            Self::Relaxed => 2,
        }
    }
}

thread_local! {
    /// Whose captures this thread's calls may end.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// `CUstreamCaptureStatus`.
const NONE: c_int = 0;
const ACTIVE: c_int = 1;
const INVALIDATED: c_int = 2;

impl Capture {
    /// Adds a node behind the last ones.
    pub(crate) fn take(&self, task: Task) -> Outcome {
        self.require_valid()?;
        let mut last = self.last();
        let (_, position) = self.graph.nodes().add(task, last.clone());
        *last = vec![position];
        Ok(())
    }

    /// Refuses something that no node does, which is the end of the capture.
    pub(crate) fn refuse(&self, code: Code) -> Code {
        self.is_invalid.store(true, Ordering::Relaxed);
        code
    }

    pub(crate) fn require_valid(&self) -> Outcome {
        // Relaxed: a flag that orders nothing.
        if self.is_invalid.load(Ordering::Relaxed) { Err(Code::STREAM_CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// What comes next waits for the last nodes, and an event that was recorded here stands for them.
    pub(crate) fn last(&self) -> MutexGuard<'_, Vec<usize>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The captures under way.
#[derive(Debug, Default)]
pub(crate) struct Captures(Mutex<Vec<Arc<Capture>>>);

impl Captures {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<Capture>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a call that may wait for a device, if a capture forbids it to this thread; that is the end of the
    /// capture.
    pub(crate) fn forbid(&self) -> Outcome {
        let (here, own_mode) = (thread::current().id(), MODE.get());
        let mut outcome = Ok(());
        for capture in self.list().iter() {
            let forbids = match (own_mode, capture.mode) {
                (Mode::Relaxed, _) | (_, Mode::Relaxed) => false,
                (Mode::Global, Mode::Global) => true,
                (Mode::ThreadLocal, _) | (_, Mode::ThreadLocal) => capture.thread == here,
            };
            if forbids {
                outcome = Err(capture.refuse(Code::STREAM_CAPTURE_UNSUPPORTED));
            }
        }
        outcome
    }

    fn remove(&self, capture: &Arc<Capture>) {
        self.list().retain(|known| !Arc::ptr_eq(known, capture));
    }
}

/// Ends the capture in a stream that goes away.
pub(crate) fn abandon(machine: &Machine, stream: &Stream) {
    if let Some(capture) = stream.set_capture(None) {
        machine.captures.remove(&capture);
    }
}

exports! {
    fn cuStreamBeginCapture_v2(val stream: Raw, val mode: c_int) {
        let here = current()?;
        let _turn = here.enter();
        let mode = Mode::of(mode)?;
        // The default stream is many programs' at once.
        if stream.addr() <= 2 {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        let stream = here.stream(stream)?;
        if stream.capture().is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let (thread, is_invalid) = (thread::current().id(), AtomicBool::new(false));
        let (graph, last) = (Arc::default(), Mutex::default());
        let capture = Arc::new(Capture { graph, last, thread, mode, is_invalid });
        here.machine.captures.list().push(Arc::clone(&capture));
        stream.set_capture(Some(capture));
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(out mode: c_int) {
        let _machine = running()?;
        let new = Mode::of(mode.get()?)?;
        mode.set(MODE.replace(new).code())
    }

    fn cuStreamEndCapture(val stream: Raw, out graph: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        let capture = stream.capture().ok_or(Code::ILLEGAL_STATE)?;
        if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        abandon(here.machine, &stream);
        let valid = capture.require_valid();
        match valid {
            Ok(()) => graph.set(here.machine.graphs.add(Arc::clone(&capture.graph))),
            Err(code) => {
                graph.set(std::ptr::null_mut())?;
                Err(code)
            }
        }
    }

    fn cuStreamIsCapturing(val stream: Raw, out status: c_int) {
        let here = current()?;
        let capture = here.stream(stream)?.capture();
        status.set(match capture.map(|capture| capture.require_valid()) {
            None => NONE,
            Some(Ok(())) => ACTIVE,
            Some(Err(_)) => INVALIDATED,
        })
    }
}
