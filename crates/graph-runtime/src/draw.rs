//! Pictures of graphs: what comes after what, and why.

mod dot;
mod layout;
mod picture;
mod svg;

/// Nodes of a picture: beyond that nobody finds anything in one.
const MOST_NODES: usize = 600;

/// How devices are told apart: fill and border. Devices beyond them begin again with the first.
const COLOURS: [(&str, &str); 8] = [
    ("#e3f5e1", "#3f8f1f"),
    ("#e0efff", "#2563eb"),
    ("#f3e8ff", "#7c3aed"),
    ("#ffe9e6", "#d1453b"),
    ("#dcf5f5", "#0f8a8a"),
    ("#fce7f3", "#be2f7c"),
    ("#eef6c8", "#6b7f0a"),
    ("#e9e9f2", "#4b5563"),
];

/// The host's processors.
const HOST_COLOURS: (&str, &str) = ("#fdf3e1", "#b7791f");

/// What lies on the critical path.
const CRITICAL: &str = "#c2410c";

/// Everything else that leads from node to node.
const EDGE: &str = "#7c8794";

const fn colours(device: Option<usize>) -> (&'static str, &'static str) {
    match device {
        Some(device) => COLOURS[device % COLOURS.len()],
        None => HOST_COLOURS,
    }
}
