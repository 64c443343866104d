//! What an actor is: its code, its state, and what its handler can do.

use std::{fmt, sync::Arc, time::Duration};

use serde::Serialize;

use crate::{
    ExecutorImage, Message,
    device::code::{DeviceCode, Text},
    wire::PRIORITIES,
};

/// Who an actor is. Ids are not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ActorId(pub u32);

impl ActorId {
    /// The program outside all actors.
    pub const HOST: Self = Self(0);
}

impl fmt::Display for ActorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::HOST { f.write_str("the host") } else { write!(f, "actor {}", self.0) }
    }
}

/// How urgent a message is. More urgent ones overtake others, and only those.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[repr(u8)]
pub enum Priority {
    /// Before all others.
    High = 0,
    /// As most are.
    #[default]
    Normal = 1,
    /// After all others.
    Low = 2,
}

const _: () = assert!(Priority::Low as usize + 1 == PRIORITIES);

/// What a message or a state is: both sides name the same id and size, or they do not mean the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Layout {
    /// The layout's own id, such as a hash of its definition.
    pub id: u64,
    /// Its size in bytes.
    pub size: u32,
}

/// What happens to a message whose receiver has as many as it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FullPolicy {
    /// Its sender keeps it and is not served meanwhile, until there is room or the time is over.
    Wait {
        /// How long.
        within: Duration,
    },
    /// It is refused.
    Reject,
    /// The receiver drops its oldest.
    DropOldest,
    /// It is kept in host memory, however many there are.
    Spill,
}

/// What a handler is called with: what it can do, the state, and the message.
pub(crate) type Handler = dyn Fn(&mut Context<'_>, &mut [u8], &Message) + Send + Sync;

/// An actor's code, and the layouts it was written for.
#[derive(Clone)]
pub struct ActorCode {
    pub(crate) body: Body,
    pub(crate) state: Layout,
    pub(crate) messages: Vec<(u32, Layout)>,
}

/// What runs.
#[derive(Clone)]
pub(crate) enum Body {
    Host(Arc<Handler>),
    Device(DeviceCode),
}

impl ActorCode {
    /// A Rust function over states of this layout. It runs on host devices.
    ///
    /// It never waits: what it sends goes to an outbox, from where it is sent when the handler has returned.
    pub fn host(
        state: Layout,
        handler: impl Fn(&mut Context<'_>, &mut [u8], &Message) + Send + Sync + 'static,
    ) -> Self {
        Self { body: Body::Host(Arc::new(handler)), state, messages: Vec::new() }
    }

    /// A function in CUDA C over states of this layout, in a source that declares it. It runs on CUDA devices:
    ///
    /// ```
    /// # use warpweft_k2k_router::{ActorCode, Layout};
    /// let source = "struct Count { uint64_t messages; };
    ///     __device__ void count(warpweft_context &cx, Count *state, const warpweft_message &m) {
    ///         state->messages++;
    ///         cx.reply(&state->messages, sizeof state->messages);
    ///     }";
    /// // SAFETY: it touches its state, which is as long as the layout says, and nothing else.
    /// let code = unsafe { ActorCode::cuda(Layout { id: 1, size: 8 }, source, "count") };
    /// ```
    ///
    /// It is called by one thread, or by the 32 of a warp where [`ActorSpec::threads`] says so. What it can do is in
    /// `warpweft_context` of [`EXECUTOR_HEADER`](crate::EXECUTOR_HEADER); it never waits. A state begins at a multiple of
    /// 256 bytes and as zeros.
    ///
    /// # Safety
    ///
    /// - The function has this form, returns, and touches its state, its message and memory of its own alone, whatever
    ///   those hold; a state has as many bytes as the layout says.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub unsafe fn cuda(state: Layout, source: impl Into<Arc<str>>, function: &str) -> Self {
        let code = DeviceCode { text: Text::Source(source.into()), function: function.into() };
        Self { body: Body::Device(code), state, messages: Vec::new() }
    }

    /// A handler of an image, over states of this layout. All actors of a device whose code is of an image are of the
    /// same one.
    pub fn of_image(state: Layout, image: &Arc<ExecutorImage>, handler: &str) -> Self {
        let code = DeviceCode { text: Text::Image(Arc::clone(image)), function: handler.into() };
        Self { body: Body::Device(code), state, messages: Vec::new() }
    }

    /// The same, and it takes messages of this kind and layout. Code that names none takes any.
    #[must_use]
    pub fn takes(mut self, kind: u32, layout: Layout) -> Self {
        self.messages.push((kind, layout));
        self
    }
}

impl fmt::Debug for ActorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActorCode").field("state", &self.state).finish_non_exhaustive()
    }
}

/// An actor to begin.
#[derive(Debug, Clone)]
pub struct ActorSpec {
    /// What it is called, for people.
    pub name: String,
    /// Its code.
    pub code: ActorCode,
    /// Its state, which begins as zeros; it must be of the code's layout.
    pub state: Layout,
    /// Messages that may wait for it.
    pub inbox_capacity: u32,
    /// What happens to more.
    pub full: FullPolicy,
    /// Threads that its handler wants. A Rust function has one, one in CUDA C has one or 32.
    pub threads: u32,
    /// Of messages to it that say nothing else.
    pub priority: Priority,
}

impl ActorSpec {
    /// An actor with an inbox of 1024 messages whose senders wait for room for a second.
    pub fn new(name: impl Into<String>, code: ActorCode) -> Self {
        Self {
            name: name.into(),
            state: code.state,
            code,
            inbox_capacity: 1024,
            full: FullPolicy::Wait { within: Duration::from_secs(1) },
            threads: 1,
            priority: Priority::Normal,
        }
    }

    /// The same with another inbox.
    #[must_use]
    pub fn with_inbox(mut self, capacity: u32, full: FullPolicy) -> Self {
        (self.inbox_capacity, self.full) = (capacity, full);
        self
    }

    /// The same with another priority.
    #[must_use]
    pub fn with_priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

/// How a message is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// How urgent it is; as its receiver says if this does not.
    pub priority: Option<Priority>,
    /// It is worth nothing later than this from now.
    pub deadline: Option<Duration>,
}

/// A message on its way out of a handler; its bytes are in the outbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing {
    pub(crate) to: ActorId,
    pub(crate) kind: u32,
    pub(crate) options: SendOptions,
    /// What it answers, if it does.
    pub(crate) correlation: Option<u32>,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// What a handler has sent.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) messages: Vec<Outgoing>,
    pub(crate) bytes: Vec<u8>,
}

/// What a handler can do beside changing its state.
#[derive(Debug)]
pub struct Context<'a> {
    pub(crate) id: ActorId,
    pub(crate) message: &'a Message,
    pub(crate) outbox: &'a mut Outbox,
    pub(crate) deferred: bool,
}

impl Context<'_> {
    /// The actor itself.
    pub const fn id(&self) -> ActorId {
        self.id
    }

    /// Who sent the message.
    pub const fn source(&self) -> ActorId {
        ActorId(self.message.header.source)
    }

    /// Sends a message.
    pub fn send(&mut self, to: ActorId, kind: u32, payload: &[u8]) {
        self.send_with(to, kind, payload, SendOptions::default());
    }

    /// Sends a message with options.
    pub fn send_with(&mut self, to: ActorId, kind: u32, payload: &[u8], options: SendOptions) {
        self.push(to, kind, payload, options, None);
    }

    /// Sends the same to each of these.
    pub fn broadcast(&mut self, to: &[ActorId], kind: u32, payload: &[u8]) {
        for &to in to {
            self.send(to, kind, payload);
        }
    }

    /// Answers the message, if an answer is expected.
    pub fn reply(&mut self, payload: &[u8]) {
        let header = self.message.header;
        if header.correlation != 0 {
            self.push(self.source(), header.kind, payload, SendOptions::default(), Some(header.correlation));
        }
    }

    /// Has the message come again once another was served. What was sent meanwhile stays sent.
    pub fn defer(&mut self) {
        self.deferred = true;
    }

    fn push(
        &mut self,
        to: ActorId,
        kind: u32,
        payload: &[u8],
        options: SendOptions,
        correlation: Option<u32>,
    ) {
        let start = self.outbox.bytes.len();
        self.outbox.bytes.extend_from_slice(payload);
        let end = self.outbox.bytes.len();
        self.outbox.messages.push(Outgoing { to, kind, options, correlation, start, end });
    }
}
