//! Tasks of the host: functions that run on its processors, in order with what devices do.

use std::{error::Error, fmt, sync::Arc};

use warpweft_core_types::{BufferView, RangeError};

use crate::usage::Usage;

/// Why a task did not do what it was to do, in its own words.
pub type TaskError = Box<dyn Error + Send + Sync>;

type Body = dyn Fn(&TaskContext<'_>) -> Result<(), TaskError> + Send + Sync;

/// A function for a processor of the host.
///
/// It may be called from any thread, and again for every replay; what it panics with is the node's failure. One that
/// waits holds a worker meanwhile: enough of those, waiting for other tasks, wait until their deadlines.
#[derive(Clone)]
pub struct HostTask {
    body: Arc<Body>,
    brief: bool,
}

impl HostTask {
    /// A task that cannot fail but by panicking.
    pub fn new(body: impl Fn(&TaskContext<'_>) + Send + Sync + 'static) -> Self {
        Self::fallible(move |context| {
            body(context);
            Ok(())
        })
    }

    /// A task that may fail.
    pub fn fallible(
        body: impl Fn(&TaskContext<'_>) -> Result<(), TaskError> + Send + Sync + 'static,
    ) -> Self {
        Self { body: Arc::new(body), brief: false }
    }

    /// The same, which ends within 20 microseconds: a thread that waits for it may run it itself.
    #[must_use]
    pub fn brief(mut self) -> Self {
        self.brief = true;
        self
    }

    pub(crate) const fn is_brief(&self) -> bool {
        self.brief
    }

    pub(crate) fn call(&self, context: &TaskContext<'_>) -> Result<(), TaskError> {
        (self.body)(context)
    }
}

impl fmt::Debug for HostTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostTask")
    }
}

/// What a task sees: the views it was recorded with.
///
/// Bytes are copied out and in, and no reference to them exists: devices may have the same memory mapped.
#[derive(Debug)]
pub struct TaskContext<'a> {
    operands: &'a [(BufferView, Usage)],
}

/// Why a task cannot have bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandError {
    /// The range leaves the view, or the host cannot address it.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The task was recorded with fewer views.
    #[error("the task has {count} views and no number {index}")]
    NoSuchView {
        /// The position asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The task was recorded with another usage.
    #[error("view {index} was recorded as {recorded}, so the task does not {what} it")]
    Usage {
        /// The view.
        index: usize,
        /// How it was recorded.
        recorded: Usage,
        /// `read` or `write`.
        what: &'static str,
    },
}

impl<'a> TaskContext<'a> {
    pub(crate) const fn new(operands: &'a [(BufferView, Usage)]) -> Self {
        Self { operands }
    }

    /// How many views it has.
    pub const fn len(&self) -> usize {
        self.operands.len()
    }

    /// Whether it has none.
    pub const fn is_empty(&self) -> bool {
        self.operands.is_empty()
    }

    /// The length of view `index` in bytes.
    ///
    /// # Errors
    ///
    /// [`OperandError::NoSuchView`].
    pub fn size(&self, index: usize) -> Result<u64, OperandError> {
        Ok(self.operand(index)?.0.size())
    }

    /// Copies bytes of view `index` from `offset` on into `into`.
    ///
    /// # Errors
    ///
    /// See [`OperandError`].
    pub fn read(&self, index: usize, offset: u64, into: &mut [u8]) -> Result<(), OperandError> {
        let (view, usage) = self.operand(index)?;
        if !usage.reads() {
            return Err(OperandError::Usage { index, recorded: *usage, what: "read" });
        }
        Ok(part(view, offset, into.len())?.map_or(Ok(()), |view| view.read(into))?)
    }

    /// Copies `from` to view `index` from `offset` on.
    ///
    /// # Errors
    ///
    /// See [`OperandError`].
    pub fn write(&self, index: usize, offset: u64, from: &[u8]) -> Result<(), OperandError> {
        let (view, usage) = self.operand(index)?;
        if !usage.writes() {
            return Err(OperandError::Usage { index, recorded: *usage, what: "write" });
        }
        Ok(part(view, offset, from.len())?.map_or(Ok(()), |view| view.write(from))?)
    }

    /// Copies all bytes of view `src` to view `dst`, of the same length.
    ///
    /// # Errors
    ///
    /// See [`OperandError`].
    pub fn copy(&self, src: usize, dst: usize) -> Result<(), OperandError> {
        let (from, to) = (self.operand(src)?, self.operand(dst)?);
        for (index, usage, allowed, what) in
            [(src, from.1, from.1.reads(), "read"), (dst, to.1, to.1.writes(), "write")]
        {
            if !allowed {
                return Err(OperandError::Usage { index, recorded: usage, what });
            }
        }
        Ok(to.0.copy_by_host(&from.0)?)
    }

    /// All bytes of view `index`.
    ///
    /// # Errors
    ///
    /// See [`OperandError`].
    pub fn bytes(&self, index: usize) -> Result<Vec<u8>, OperandError> {
        let mut bytes = vec![0; usize::try_from(self.size(index)?).unwrap_or(usize::MAX)];
        self.read(index, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn operand(&self, index: usize) -> Result<&(BufferView, Usage), OperandError> {
        self.operands.get(index).ok_or(OperandError::NoSuchView { index, count: self.operands.len() })
    }
}

/// A part of a view; none where it holds no bytes.
pub(crate) fn part(view: &BufferView, offset: u64, len: usize) -> Result<Option<BufferView>, RangeError> {
    if len == 0 && offset <= view.size() {
        return Ok(None);
    }
    view.slice(offset..offset.saturating_add(len as u64)).map(Some)
}
