//! Streams, which run what they are given in order, and events, which are marks in them.

use std::{
    collections::VecDeque,
    ffi::{c_int, c_uint},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::{
    context::{Context, Here, LOOK, Ticket, current},
    exports::{Code, Outcome, Raw, exports},
    graph::Graph,
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
    /// What is recorded and not done, while a capture goes on.
    capture: Mutex<Option<Vec<Task>>>,
}

#[derive(Default)]
struct Line {
    ops: VecDeque<Op>,
    /// Some thread is at work on it, or will be.
    served: bool,
}

/// One thing to do.
pub(crate) enum Op {
    /// A copy, a kernel or the like; an error is a fault. Cold calls wait for the ticket.
    Task(Task, Option<Ticket>),
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

    /// Puts work at the end, or into the capture that goes on.
    pub(crate) fn push_task(self: &Arc<Self>, task: Task) -> Outcome {
        if let Some(recorded) = &mut *self.capture() {
            recorded.push(task);
            return Ok(());
        }
        let ticket = task.ticket(&self.context);
        self.push(Op::Task(task, ticket));
        Ok(())
    }

    fn capture(&self) -> MutexGuard<'_, Option<Vec<Task>>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Does what is in it, until it is empty.
    pub(crate) fn run(&self) {
        let Ok(machine) = running() else { return };
        // Kept until the marks behind a kernel are passed: who waited for the kernel finds them so.
        let mut last: Option<Ticket> = None;
        loop {
            let mut line = self.line();
            let Some(op) = line.ops.pop_front() else {
                line.served = false;
                drop(line);
                drop(last);
                return;
            };
            drop(line);
            self.shorter.notify_all();
            match op {
                Op::Free(free) => free(),
                // After a fault nothing else runs any more; what an operation holds is let go.
                _ if self.is_over(machine) => {}
                Op::Task(task, ticket) => {
                    if let Err(code) = task.run(machine, &self.context)
                        && !self.context.is_dead()
                    {
                        machine.break_down(code);
                    }
                    last = ticket.or(last);
                }
                Op::Mark(event, number) => event.pass(number),
                Op::Wait(event, number) => {
                    last = None;
                    event.wait(number, || self.is_over(machine));
                }
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
        here.machine.streams.remove(stream).map(|_| ())
    }

    fn cuStreamGetCtx(val stream: Raw, out context: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        context.set(here.machine.contexts.handle_of(&stream.context)?)
    }

    fn cuStreamIsCapturing(val stream: Raw, out status: c_int) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        let is_capturing = stream.capture().is_some();
        status.set(is_capturing.into())
    }

    fn cuStreamBeginCapture_v2(val stream: Raw, val mode: c_int) {
        let here = current()?;
        let _turn = here.enter();
        // The default stream cannot be captured.
        if stream.addr() <= 2 || !(0..=2).contains(&mode) {
            return Err(Code::INVALID_VALUE);
        }
        let stream = here.stream(stream)?;
        let mut capture = stream.capture();
        if capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        *capture = Some(Vec::new());
        Ok(())
    }

    fn cuStreamEndCapture(val stream: Raw, out graph: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let recorded = here.stream(stream)?.capture().take().ok_or(Code::ILLEGAL_STATE)?;
        graph.set(here.machine.graphs.add(Arc::new(Graph::chain(recorded))))
    }

    fn cuStreamWaitEvent(val stream: Raw, val event: Raw, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        let (stream, event) = (here.stream(stream)?, here.machine.events.get(event)?);
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let number = event.records().recorded;
        stream.push(Op::Wait(event, number));
        Ok(())
    }

    fn cuStreamQuery(val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        let line = stream.line();
        if line.ops.is_empty() && !line.served { Ok(()) } else { Err(Code::NOT_READY) }
    }

    fn cuStreamWriteValue64_v2(val stream: Raw, val address: u64, val value: u64, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        let task = Task::Write { to: address, value };
        task.check(here.machine)?;
        if flags != 0 || !address.is_multiple_of(8) {
            return Err(Code::INVALID_VALUE);
        }
        stream.push_task(task)
    }

    fn cuEventCreate(out event: Raw, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        let context = Arc::clone(&here.context);
        let made = Event { context, records: Mutex::default(), passed: Condvar::new() };
        event.set(here.machine.events.add(Arc::new(made)))
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
        let mut records = event.records();
        records.recorded += 1;
        let number = records.recorded;
        drop(records);
        stream.push(Op::Mark(event, number));
        Ok(())
    }

    fn cuEventQuery(val event: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let event = here.machine.events.get(event)?;
        let records = event.records();
        if records.passed >= records.recorded { Ok(()) } else { Err(Code::NOT_READY) }
    }
}
