//! Where everything lies in the memory of a device and in the host's.

use crate::wire::{HEADER_LINES, LINE_BYTES, MAX_PAYLOAD, PRIORITIES};

/// Devices that one kernel reaches.
pub(crate) const DEVICES: usize = 8;

/// Lanes between the same two ends: orders of the host, then one for each priority.
pub(crate) const CLASSES: usize = 4;

/// Kinds of messages that an actor may name.
pub(crate) const KINDS: usize = 8;

/// Bytes that are left for each structure of the kernel: its header says that they are enough.
const OWN: u64 = 256;
const RECORD: u64 = 256;
const PIECE: u64 = 272;
const INPUT: u64 = 16;
const OUTPUT: u64 = 24;
const SPILL: u64 = 65_536;

/// Ids that the table of actors holds, and actors of one executor.
pub(crate) const ACTORS: u32 = 1 << 16;
pub(crate) const SLOTS: u32 = 1024;

/// What decides where things lie. All devices of a system have the same, but for `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Executors of each device.
    pub(crate) executors: u32,
    /// Executors of all devices that have such.
    pub(crate) all: u32,
    /// The first of this device among all.
    pub(crate) first: u32,
    /// Lines of a lane, at least.
    pub(crate) lane_lines: usize,
    /// Bytes for states of actors.
    pub(crate) state_bytes: u64,
    /// Bytes for messages that wait at an executor.
    pub(crate) waiting_bytes: u64,
    pub(crate) sample_every: u32,
}

/// Offsets, and how much memory there is in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) executors: u32,
    /// Of `1 << shift` lines.
    pub(crate) shift: u32,
    pub(crate) host_shift: u32,
    config: Config,
    pub(crate) states: u64,
    pub(crate) state_bytes: u64,
    /// Where memory begins that stands for devices which are not there.
    pub(crate) nobody: u64,
    pub(crate) device_bytes: u64,
    pub(crate) host_rings: u64,
    pub(crate) host_credits: u64,
    pub(crate) host_returned: u64,
    pub(crate) host_out: u64,
    pub(crate) host_out_credits: u64,
    pub(crate) host_beats: u64,
    pub(crate) host_counters: u64,
    pub(crate) host_slots: u64,
    pub(crate) host_bytes: u64,
}

/// `warpweft_config`, word by word.
type Config = [u64; CONFIG.len()];

/// Its fields, in order.
const CONFIG: [&str; 30] = [
    "executors",
    "all",
    "first",
    "shift",
    "host_shift",
    "slots",
    "chunks",
    "actors",
    "sample_every",
    "table",
    "clock",
    "beats",
    "bridge",
    "rings",
    "credits",
    "own",
    "own_stride",
    "inputs",
    "outputs",
    "records",
    "pieces",
    "scratch",
    "spill",
    "host_rings",
    "host_credits",
    "host_returned",
    "host_out",
    "host_out_credits",
    "host_beats",
    "host_counters",
];

/// Gives out one range after the other.
#[derive(Debug, Default)]
struct Cursor(u64);

impl Cursor {
    fn take(&mut self, bytes: u64) -> u64 {
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(256);
        at
    }
}

impl Layout {
    pub(crate) fn new(shape: &Shape) -> Self {
        let shift = shape.lane_lines.next_power_of_two().trailing_zeros();
        // Replies of any length, and what inspections tell.
        let host_shift = shift.max(12);
        let (executors, all) = (u64::from(shape.executors), u64::from(shape.all));
        let chunks = (shape.waiting_bytes / PIECE).max(512);
        let (lane, host_lane) = (16_u64 << shift, 16_u64 << host_shift);

        let mut own = Cursor::default();
        own.take(OWN);
        let inputs = own.take((all + 1) * CLASSES as u64 * INPUT);
        let outputs = own.take((all + 1) * PRIORITIES as u64 * OUTPUT);
        let records = own.take(u64::from(SLOTS) * RECORD);
        // The first is none.
        let pieces = own.take((chunks + 1) * PIECE);
        let scratch = own.take(MAX_PAYLOAD as u64 + 256);
        let spill = own.take(SPILL);

        let mut device = Cursor::default();
        device.take(4096);
        let table = device.take(u64::from(ACTORS) * 16);
        let clock = device.take(8);
        let beats = device.take((executors + 1) * 8);
        let bridge = device.take(256 + executors * CLASSES as u64 * 8);
        let rings = device.take(executors * (all + 1) * CLASSES as u64 * lane);
        let credits = device.take(executors * all * CLASSES as u64 * 8);
        // The bridge has memory of its own as well.
        let own_at = device.take((executors + 1) * own.0);
        let states = device.take(shape.state_bytes);
        let nobody = device.take(DEVICES as u64 * 256);

        let mut host = Cursor::default();
        let host_rings = host.take(CLASSES as u64 * host_lane);
        let host_credits = host.take(CLASSES as u64 * 8);
        let host_returned = host.take(executors * CLASSES as u64 * 8);
        let host_out = host.take((executors + 1) * host_lane);
        let host_out_credits = host.take((executors + 1) * 8);
        let host_beats = host.take(executors * 8);
        let host_counters = host.take((executors + 1) * COUNTERS * 8);
        let host_slots = host.take(executors * u64::from(SLOTS) * 16);

        let config = [
            executors,
            all,
            u64::from(shape.first),
            u64::from(shift),
            u64::from(host_shift),
            u64::from(SLOTS),
            chunks,
            u64::from(ACTORS),
            u64::from(shape.sample_every),
            table,
            clock,
            beats,
            bridge,
            rings,
            credits,
            own_at,
            own.0,
            inputs,
            outputs,
            records,
            pieces,
            scratch,
            spill,
            host_rings,
            host_credits,
            host_returned,
            host_out,
            host_out_credits,
            host_beats,
            host_counters,
        ];
        Self {
            executors: shape.executors,
            shift,
            host_shift,
            config,
            states,
            state_bytes: shape.state_bytes,
            nobody,
            device_bytes: device.0,
            host_rings,
            host_credits,
            host_returned,
            host_out,
            host_out_credits,
            host_beats,
            host_counters,
            host_slots,
            host_bytes: host.0,
        }
    }

    /// What the kernel reads at the beginning of its device's memory.
    pub(crate) fn config_bytes(&self) -> Vec<u8> {
        self.config.iter().chain([&self.host_slots]).flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Where the lane from an executor begins, or that of the bridge, which comes behind them.
    pub(crate) const fn out_lane(&self, executor: u32) -> u64 {
        self.host_out + ((executor as u64) << self.host_shift) * 16
    }

    /// The longest payload that goes through every lane.
    pub(crate) const fn longest(lane_lines: usize) -> usize {
        // A message of the host has a line in front.
        let lines = lane_lines.next_power_of_two().saturating_sub(HEADER_LINES + 1);
        let bytes = lines * LINE_BYTES;
        if bytes < MAX_PAYLOAD { bytes } else { MAX_PAYLOAD }
    }
}

/// Words that an executor counts in: served, handed on, dead letters without words.
pub(crate) const COUNTERS: u64 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        executors: 3,
        all: 6,
        first: 3,
        lane_lines: 1000,
        state_bytes: 1 << 16,
        waiting_bytes: 1 << 18,
        sample_every: 63,
    };

    #[test]
    fn the_kernel_reads_the_fields_in_this_order() {
        let text = crate::EXECUTOR_HEADER;
        let body = text.split_once("struct warpweft_config {").unwrap().1.split_once("};").unwrap().0;
        let lines = body.lines().map(|line| line.split("//").next().unwrap_or_default());
        let declared = lines.collect::<Vec<_>>().join(" ").replace("uint64_t", "").replace(';', ",");
        let fields: Vec<&str> =
            declared.split(',').map(str::trim).filter(|field| !field.is_empty()).collect();
        assert_eq!(fields, [CONFIG.as_slice(), &["host_slots"]].concat());
    }

    #[test]
    fn sizes_and_numbers_are_the_header_s() {
        let text = crate::EXECUTOR_HEADER;
        for part in [
            format!("WARPWEFT_DEVICES = {DEVICES}"),
            format!("WARPWEFT_CLASSES = {CLASSES}"),
            format!("WARPWEFT_KINDS = {KINDS}"),
            format!("WARPWEFT_SPILL = {SPILL}"),
            format!("sizeof(warpweft_piece) == {PIECE} && sizeof(warpweft_actor) <= {RECORD}"),
            format!("sizeof(warpweft_own) <= {OWN}"),
        ] {
            assert!(text.contains(&part), "{part}");
        }
    }

    #[test]
    fn nothing_overlaps_and_all_devices_are_alike() {
        let layout = Layout::new(&SHAPE);
        assert_eq!((layout.shift, layout.host_shift), (10, 12));
        assert!(layout.config[9..=15].is_sorted() && layout.config[17..=22].is_sorted());
        assert!(layout.states + layout.state_bytes <= layout.nobody);
        assert!(layout.out_lane(4) <= layout.host_out_credits);
        let first = Layout::new(&Shape { first: 0, ..SHAPE });
        assert_eq!(first.config[3..], layout.config[3..]);
        assert_eq!(layout.config_bytes().len(), 31 * 8);
    }
}
