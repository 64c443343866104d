//! What submissions in flight use.

use std::{any::Any, sync::Arc};

use warpweft_core_types::{Buffer, BufferView, Kernel, NativeCommunicator, Op, PreparedGraph};

/// How many of the last objects are known again: programs use the same few again and again.
const RECENT: usize = 8;

/// Everything that a submission in flight uses, held until it is over.
#[derive(Debug)]
pub struct KeepAlive {
    used: Vec<Used>,
    /// Addresses of the last entries.
    recent: [usize; RECENT],
    next: usize,
}

#[derive(Debug)]
enum Used {
    Buffer(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Buffer>),
    Kernel(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Kernel>),
    Graph(PreparedGraph),
    Other(#[expect(dead_code, reason = "held for its drop")] Arc<dyn Any + Send + Sync>),
}

impl Default for KeepAlive {
    /// With room for what most submissions use.
    fn default() -> Self {
        Self { used: Vec::with_capacity(RECENT), recent: [0; RECENT], next: 0 }
    }
}

impl KeepAlive {
    /// Holds what an operation uses. Graphs hold what their nodes use.
    pub fn op(&mut self, op: &Op<'_>) {
        match op {
            Op::Launch(launch) => self.kernel(launch.kernel()),
            Op::Collective(group) => self.communicator(group.communicator()),
            Op::Replay(graph) => return self.used.push(Used::Graph((*graph).clone())),
            _ => {}
        }
        op.for_each_access(|view, _| self.buffer(view));
    }

    /// Holds something of the backend's own.
    pub fn other(&mut self, other: Arc<dyn Any + Send + Sync>) {
        self.used.push(Used::Other(other));
    }

    /// The graphs it holds.
    pub fn graphs(&self) -> impl Iterator<Item = &PreparedGraph> {
        self.used.iter().filter_map(|used| match used {
            Used::Graph(graph) => Some(graph),
            _ => None,
        })
    }

    /// Lets go of everything, and can be used again.
    pub fn clear(&mut self) {
        self.used.clear();
        self.recent = [0; RECENT];
        self.next = 0;
    }

    fn buffer(&mut self, view: &BufferView) {
        let buffer = view.buffer();
        if self.is_new(Arc::as_ptr(buffer).addr()) {
            self.used.push(Used::Buffer(Arc::clone(buffer)));
        }
    }

    fn kernel(&mut self, kernel: &Arc<dyn Kernel>) {
        if self.is_new(Arc::as_ptr(kernel).addr()) {
            self.used.push(Used::Kernel(Arc::clone(kernel)));
        }
    }

    fn communicator(&mut self, communicator: &Arc<dyn NativeCommunicator>) {
        if self.is_new(Arc::as_ptr(communicator).addr()) {
            self.used.push(Used::Other(Arc::clone(communicator) as Arc<dyn Any + Send + Sync>));
        }
    }

    fn is_new(&mut self, address: usize) -> bool {
        if self.recent.contains(&address) {
            return false;
        }
        self.recent[self.next % RECENT] = address;
        self.next += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_lately_is_known_again() {
        let mut keep = KeepAlive::default();
        let mut note = |address, is_new| assert_eq!(keep.is_new(address), is_new, "{address}");
        (1..=RECENT).for_each(|address| note(address, true));
        note(1, false);
        // The oldest makes room.
        note(RECENT + 1, true);
        note(1, true);
        note(RECENT + 1, false);
    }

    #[test]
    fn what_is_let_go_of_is_dropped() {
        let (mut keep, other) = (KeepAlive::default(), Arc::new(7));
        keep.other(Arc::clone(&other) as Arc<dyn Any + Send + Sync>);
        assert_eq!(Arc::strong_count(&other), 2);
        keep.clear();
        assert_eq!(Arc::strong_count(&other), 1);
    }
}
