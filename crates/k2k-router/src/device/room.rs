//! What the host keeps of actors on a device: their seats in the protocol, and the memory that they take.

use rustc_hash::FxHashMap;

use super::{
    layout::{KINDS, Layout, SLOTS},
    memory::States,
};
use crate::{ActorError, ActorId, ActorSpec, FullPolicy, epoch::Seat};

/// An actor of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(crate) seat: Seat,
    /// Its executor, among those of the device.
    pub(crate) executor: u32,
    pub(crate) slot: u32,
    memory: u64,
    size: u64,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Rooms {
    rooms: FxHashMap<u32, Room>,
    states: States,
    /// By executor: slots that were given back, and the next that nobody had.
    spare: Vec<(Vec<u32>, u32)>,
}

impl Rooms {
    pub(crate) fn new(layout: &Layout) -> Self {
        Self {
            rooms: FxHashMap::default(),
            states: States::new(layout.states, layout.state_bytes),
            spare: vec![(Vec::new(), 0); layout.executors as usize],
        }
    }

    /// Finds room for an actor.
    pub(crate) fn add(&mut self, actor: ActorId, executor: u32, size: u32) -> Result<Room, ActorError> {
        let full = |what: &str| ActorError::Exhausted { reason: what.to_owned() };
        let (spare, next) =
            self.spare.get_mut(executor as usize).ok_or_else(|| full("there is no such executor"))?;
        let size = u64::from(size);
        let slot = match spare.pop() {
            Some(slot) => slot,
            None if *next < SLOTS => {
                *next += 1;
                *next - 1
            }
            None => return Err(full("its executor has as many actors as it can have")),
        };
        let Some(memory) = self.states.take(size) else {
            spare.push(slot);
            return Err(full("no memory is left for its state, see `SystemConfig::state_bytes`"));
        };
        let room = Room { seat: Seat::serving(), executor, slot, memory, size };
        self.rooms.insert(actor.0, room);
        Ok(room)
    }

    pub(crate) fn get_mut(&mut self, actor: ActorId) -> Option<&mut Room> {
        self.rooms.get_mut(&actor.0)
    }

    /// The actor is gone, by the device's word.
    pub(crate) fn remove(&mut self, actor: ActorId) {
        if let Some(room) = self.rooms.remove(&actor.0) {
            self.states.give_back(room.memory, room.size);
            if let Some((spare, _)) = self.spare.get_mut(room.executor as usize) {
                spare.push(room.slot);
            }
        }
    }
}

/// `warpweft_insert`: what the device is told of an actor that begins.
pub(crate) fn insert_bytes(room: &Room, spec: &ActorSpec, code: u32) -> Vec<u8> {
    let kinds = &spec.code.messages;
    let (rejects, within) = match spec.full {
        FullPolicy::Wait { within } => (0, u64::try_from(within.as_nanos()).unwrap_or(u64::MAX / 2)),
        _ => (1, 0),
    };
    let count = u32::try_from(kinds.len()).unwrap_or(u32::MAX);
    let words = [room.slot, code, spec.threads, spec.inbox_capacity, rejects, count];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // An actor that waits for ever waits for a century.
    let longs = [within.min(u64::MAX / 8), room.memory, room.size];
    bytes.extend(longs.iter().flat_map(|long| long.to_le_bytes()));
    let mut named = [[0_u32; KINDS]; 2];
    for (at, (kind, layout)) in kinds.iter().take(KINDS).enumerate() {
        (named[0][at], named[1][at]) = (*kind, layout.size);
    }
    bytes.extend(named.as_flattened().iter().flat_map(|word| word.to_le_bytes()));
    bytes
}
