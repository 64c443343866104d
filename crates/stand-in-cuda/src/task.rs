//! What streams and graphs do: a copy, a fill or a kernel, as a value that can be done again.

use std::{ffi::c_uint, sync::Arc};

use crate::{
    context::{Context, Ticket},
    exports::{Code, Outcome},
    launch,
    machine::Machine,
    module::Function,
};

/// One thing to do for a device.
#[derive(Debug, Clone)]
pub(crate) enum Task {
    Copy {
        to: u64,
        from: u64,
        len: usize,
    },
    Fill(Fill),
    /// Writes eight bytes.
    Write {
        to: u64,
        value: u64,
    },
    Kernel {
        function: Arc<Function>,
        grid: [c_uint; 3],
        /// The bytes of each parameter.
        arguments: Arc<[Vec<u8>]>,
    },
    /// One after the other: the nodes of a graph, in the order in which they were added.
    All(Arc<[Task]>),
}

/// Rows of elements of 1, 2 or 4 bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) to: u64,
    pub(crate) pitch: usize,
    pub(crate) value: c_uint,
    pub(crate) element: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

impl Fill {
    /// One row.
    pub(crate) const fn row(to: u64, value: c_uint, element: usize, width: usize) -> Self {
        Self { to, pitch: 0, value, element, width, height: 1 }
    }

    fn row_bytes(&self) -> Result<usize, Code> {
        self.width.checked_mul(self.element).ok_or(Code::INVALID_VALUE)
    }

    /// From the first byte to the last.
    fn span(&self) -> Result<u64, Code> {
        let rows = self.height.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
        let before = rows.checked_mul(self.pitch).ok_or(Code::INVALID_VALUE)?;
        let all = before.checked_add(self.row_bytes()?).ok_or(Code::INVALID_VALUE)?;
        Ok(all as u64)
    }

    fn check(&self) -> Outcome {
        let sound = matches!(self.element, 1 | 2 | 4)
            && self.to.is_multiple_of(self.element as u64)
            && (self.height == 1
                || self.row_bytes()? <= self.pitch && self.pitch.is_multiple_of(self.element));
        if sound { self.span().map(|_| ()) } else { Err(Code::INVALID_VALUE) }
    }
}

impl Task {
    /// Whether it can be enqueued: what it names is there now. It is looked at again when it is done.
    pub(crate) fn check(&self, machine: &Machine) -> Outcome {
        let holds =
            |address, len| if machine.space.holds(address, len) { Ok(()) } else { Err(Code::INVALID_VALUE) };
        match self {
            Self::Copy { to, from, len } => {
                holds(*to, *len as u64)?;
                holds(*from, *len as u64)
            }
            Self::Fill(fill) => {
                fill.check()?;
                holds(fill.to, fill.span()?)
            }
            Self::Write { to, .. } => holds(*to, 8),
            Self::Kernel { .. } => Ok(()),
            Self::All(tasks) => tasks.iter().try_for_each(|task| task.check(machine)),
        }
    }

    fn has_kernel(&self) -> bool {
        match self {
            Self::Kernel { .. } => true,
            Self::All(tasks) => tasks.iter().any(Self::has_kernel),
            Self::Copy { .. } | Self::Fill(_) | Self::Write { .. } => false,
        }
    }

    /// What cold calls wait for while it is in a stream, if they do.
    pub(crate) fn ticket(&self, context: &Arc<Context>) -> Option<Ticket> {
        self.has_kernel().then(|| context.admit_kernel())
    }

    pub(crate) fn run(&self, machine: &'static Machine, context: &Arc<Context>) -> Outcome {
        let memory = machine.space.seen_from(context.device);
        match self {
            Self::Copy { to, from, len } => memory.copy(*to, *from, *len),
            Self::Write { to, value } => memory.write_long(*to, *value),
            Self::Fill(fill) => (0..fill.height).try_for_each(|row| {
                let start = fill.to + (row * fill.pitch) as u64;
                let [byte, ..] = fill.value.to_le_bytes();
                match fill.element {
                    1 => memory.set(start, fill.width, byte),
                    2 => (0..fill.width as u64)
                        .try_for_each(|at| memory.write_half(start + at * 2, fill.value)),
                    _ => (0..fill.width as u64).try_for_each(|at| memory.write(start + at * 4, fill.value)),
                }
            }),
            Self::Kernel { function, grid, arguments } => {
                launch::run(machine, context, function, *grid, arguments)
            }
            Self::All(tasks) => tasks.iter().try_for_each(|task| task.run(machine, context)),
        }
    }
}
