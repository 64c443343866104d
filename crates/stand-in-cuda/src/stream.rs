//! Streams, which run what they are given in order, and events, which are marks in them.

use std::{
    collections::VecDeque,
    ffi::c_uint,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
};

use crate::{
    capture::{self, Capture},
    context::{Context, Here, LOOK, Ticket, current},
    exports::{Code, Outcome, Raw, exports},
    machine::{Machine, running},
    task::Task,
};

/// Whoever enqueues more than this waits until there is room.
const ROOM: usize = 1024;

/// Work in order.
pub(crate) struct Stream {
    pub(crate) context: Arc<Context>,
    line: Mutex<Line>,
    shorter: Condvar,
    /// Work becomes nodes of its graph.
    capture: Mutex<Option<Arc<Capture>>>,
}

#[derive(Default)]
struct Line {
    ops: VecDeque<Op>,
    /// Some thread is at work on it, or will be.
    served: bool,
}

/// One thing to do.
pub(crate) enum Op {
    /// A copy, a kernel or the like; an error is a fault. Cold calls wait for the tickets.
    Task(Task, Vec<Ticket>),
    /// Takes memory back, whatever has happened.
    Free(Box<dyn FnOnce() + Send>),
    /// Marks the record with this number.
    Mark(Arc<Event>, u64),
    /// Waits for the record with this number.
    Wait(Arc<Event>, u64),
}

/// A mark, recorded any number of times; the last one counts.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: Arc<Context>,
    records: Mutex<Records>,
    passed: Condvar,
}

#[derive(Debug, Default)]
struct Records {
    recorded: u64,
    passed: u64,
    /// It was recorded in a stream that was being captured, behind these nodes.
    captured: Option<(Weak<Capture>, Vec<usize>)>,
}

impl Here {
    /// A stream by its handle; the smallest ones are names of the default stream.
    pub(crate) fn stream(&self, handle: Raw) -> Result<Arc<Stream>, Code> {
        if handle.addr() <= 2 {
            return Ok(self.context.default_stream());
        }
        self.machine.streams.get(handle)
    }
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            line: Mutex::default(),
            shorter: Condvar::new(),
            capture: Mutex::default(),
        }
    }

    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins a capture or ends it; the one before.
    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) -> Option<Arc<Capture>> {
        std::mem::replace(&mut *self.capture.lock().unwrap_or_else(PoisonError::into_inner), capture)
    }

    /// For what becomes no node here.
    pub(crate) fn refuse_in_capture(&self) -> Outcome {
        self.capture().map_or(Ok(()), |capture| Err(capture.refuse(Code::STREAM_CAPTURE_UNSUPPORTED)))
    }

    /// Puts something at the end, once there is room.
    pub(crate) fn push(self: &Arc<Self>, op: Op) {
        let Ok(machine) = running() else { return };
        let mut line = self.line();
        while line.ops.len() >= ROOM && !self.is_over(machine) {
            line = self.shorter.wait_timeout(line, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        line.ops.push_back(op);
        if !line.served {
            line.served = true;
            machine.workers.serve(Arc::clone(self));
        }
    }

    /// Waits until nothing is in it.
    pub(crate) fn drain(&self, machine: &Machine) {
        let mut line = self.line();
        while line.served && !self.is_over(machine) {
            line = self.shorter.wait_timeout(line, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Does what is in it, until it is empty.
    pub(crate) fn run(&self) {
        let Ok(machine) = running() else { return };
        // Tickets of the last task, until the marks right behind it are passed: on a device that is one moment.
        let mut tickets = Vec::new();
        loop {
            let mut line = self.line();
            let Some(op) = line.ops.pop_front() else {
                line.served = false;
                return;
            };
            drop(line);
            self.shorter.notify_all();
            if !matches!(op, Op::Mark(..)) {
                tickets.clear();
            }
            match op {
                Op::Free(free) => free(),
                // After a fault nothing else runs any more; what an operation holds is let go.
                _ if self.is_over(machine) => {}
                Op::Task(task, held) => {
                    tickets = held;
                    if let Err(code) = task.run(machine)
                        && !self.context.is_dead()
                    {
                        machine.break_down(code);
                    }
                }
                Op::Mark(event, number) => event.pass(number),
                Op::Wait(event, number) => event.wait(number, || self.is_over(machine)),
            }
        }
    }

    fn is_over(&self, machine: &Machine) -> bool {
        self.context.is_dead() || machine.fault().is_some()
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:?})", self.context)
    }
}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), records: Mutex::default(), passed: Condvar::new() }
    }

    /// Numbers a record, which is to be marked in a stream.
    pub(crate) fn record(&self) -> u64 {
        let mut records = self.records();
        records.recorded += 1;
        records.captured = None;
        records.recorded
    }

    fn pass(&self, number: u64) {
        let mut records = self.records();
        records.passed = records.passed.max(number);
        drop(records);
        self.passed.notify_all();
    }

    fn wait(&self, number: u64, over: impl Fn() -> bool) {
        let mut records = self.records();
        while records.passed < number && !over() {
            records = self.passed.wait_timeout(records, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

exports! {
    fn cuStreamCreate(out stream: Raw, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        stream.set(here.machine.streams.add(Arc::new(Stream::new(&here.context))))
    }

    /// What is in it still runs.
    fn cuStreamDestroy_v2(val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let gone = here.machine.streams.remove(stream)?;
        capture::abandon(here.machine, &gone);
        Ok(())
    }

    fn cuStreamGetCtx(val stream: Raw, out context: Raw) {
        let here = current()?;
        let owner = Arc::clone(&here.stream(stream)?.context);
        context.set(here.machine.contexts.handle_of(&owner).ok_or(Code::CONTEXT_IS_DESTROYED)?)
    }

    fn cuStreamWaitEvent(val stream: Raw, val event: Raw, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        let (stream, event) = (here.stream(stream)?, here.machine.events.get(event)?);
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (number, captured) = {
            let records = event.records();
            (records.recorded, records.captured.clone())
        };
        let Some(capture) = stream.capture() else {
            if let Some(other) = captured.and_then(|(capture, _)| capture.upgrade()) {
                return Err(other.refuse(Code::STREAM_CAPTURE_ISOLATION));
            }
            stream.push(Op::Wait(event, number));
            return Ok(());
        };
        capture.require_valid()?;
        let same = captured.filter(|(other, _)| std::ptr::eq(other.as_ptr(), Arc::as_ptr(&capture)));
        let Some((_, nodes)) = same else { return Err(capture.refuse(Code::STREAM_CAPTURE_ISOLATION)) };
        let mut last = capture.last();
        last.extend(nodes);
        last.sort_unstable();
        last.dedup();
        Ok(())
    }

    fn cuStreamQuery(val stream: Raw) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        // A stream that is being captured runs nothing to ask about.
        stream.refuse_in_capture()?;
        let line = stream.line();
        if line.ops.is_empty() && !line.served { Ok(()) } else { Err(Code::NOT_READY) }
    }

    fn cuStreamSynchronize(val stream: Raw) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let stream = here.stream(stream)?;
        stream.refuse_in_capture()?;
        let is_idle = || {
            let _turn = here.enter();
            let line = stream.line();
            line.ops.is_empty() && !line.served
        };
        // The context's turn is given up in between, as the driver's lock is.
        while !is_idle() {
            std::thread::yield_now();
        }
        here.machine.fault().map_or(Ok(()), Err)
    }

    fn cuEventCreate(out event: Raw, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        event.set(here.machine.events.add(Arc::new(Event::new(&here.context))))
    }

    fn cuEventDestroy_v2(val event: Raw) {
        let here = current()?;
        let _turn = here.enter();
        here.machine.events.remove(event).map(|_| ())
    }

    fn cuEventRecord(val event: Raw, val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let (event, stream) = (here.machine.events.get(event)?, here.stream(stream)?);
        // An event marks streams of its own context.
        if !Arc::ptr_eq(&event.context, &stream.context) {
            return Err(Code::INVALID_HANDLE);
        }
        if let Some(capture) = stream.capture() {
            capture.require_valid()?;
            let nodes = capture.last().clone();
            event.records().captured = Some((Arc::downgrade(&capture), nodes));
            return Ok(());
        }
        let number = event.record();
        stream.push(Op::Mark(event, number));
        Ok(())
    }

    fn cuEventQuery(val event: Raw) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter();
        let event = here.machine.events.get(event)?;
        let records = event.records();
        if records.captured.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        if records.passed >= records.recorded { Ok(()) } else { Err(Code::NOT_READY) }
    }
}
