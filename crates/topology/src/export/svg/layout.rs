//! Where everything in the picture stands.

use std::collections::BTreeSet;

use warpweft_core_types::{Bandwidth, LinkClass, PathClass};

use super::{canvas::Area, figure};
use crate::{
    DeviceKind, Edge, Known, Node, NodeId, NodeKind, Topology,
    export::tree::{self, Tree},
};

/// The whole picture.
pub(super) struct Layout {
    pub(super) blocks: Vec<Block>,
    /// Switches that join several machines; drawn beside the blocks.
    pub(super) trunks: Vec<Bar>,
    pub(super) classes: Vec<LinkClass>,
    pub(super) paths: Vec<PathClass>,
    pub(super) has_veto: bool,
    pub(super) legend_y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// One machine.
pub(super) struct Block {
    pub(super) host: Option<String>,
    pub(super) numas: Vec<Numa>,
    /// Fabrics, meshes and switches, lowest first.
    pub(super) bars: Vec<Bar>,
    /// Direct links.
    pub(super) arcs: Vec<Edge>,
    /// Junction levels that occur, nearest first.
    levels: Vec<PathClass>,
    /// All of it.
    pub(super) area: Area,
    /// Top of the row of devices.
    pub(super) row_y: f64,
    /// Bottom of the host bars.
    pub(super) floor_y: f64,
}

/// One NUMA node with what is attached to it, or everything that is attached nowhere.
pub(super) struct Numa {
    pub(super) number: Option<u32>,
    /// The node that is its memory.
    pub(super) host: Option<NodeId>,
    pub(super) cpus: Option<String>,
    pub(super) trees: Vec<Tree>,
    pub(super) spots: Vec<Spot>,
    pub(super) x: f64,
    pub(super) width: f64,
}

/// A device or network card; `x` is its middle.
pub(super) struct Spot {
    pub(super) node: NodeId,
    pub(super) x: f64,
    pub(super) width: f64,
}

/// A curve from device to device; `height` is how far its control points are above them.
pub(super) struct Arc {
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) height: f64,
}

/// A bar that stands for links among many.
pub(super) struct Bar {
    pub(super) class: LinkClass,
    pub(super) members: Vec<NodeId>,
    pub(super) bandwidth: Known<Bandwidth>,
    pub(super) text: String,
    pub(super) area: Area,
}

impl Layout {
    pub(super) fn of(topology: &Topology) -> Self {
        let mut hosts: Vec<Option<String>> = Vec::new();
        let is_placed = |node: &&Node| node.kind != NodeKind::Switch;
        for node in topology.nodes().iter().filter(is_placed) {
            if !hosts.contains(&node.place.host) {
                hosts.push(node.place.host.clone());
            }
        }
        let mut bars = bars(topology);
        let mut y = TITLE_HEIGHT;
        let mut blocks = Vec::new();
        for host in hosts {
            let block = Block::place(topology, host, &mut bars, y);
            y += block.area.height + GAP;
            blocks.push(block);
        }
        let widest = blocks.iter().map(|block| block.area.width).fold(MIN_WIDTH, f64::max);
        let mut x = MARGIN + widest + 50.0;
        for bar in &mut bars {
            bar.area.x = x;
            x += 60.0;
        }
        let mut layout = Self {
            classes: classes(topology),
            paths: paths(&blocks),
            has_veto: topology.edges().iter().any(|edge| edge.veto.is_some()),
            legend_y: y + 24.0,
            width: if bars.is_empty() { 2.0 * MARGIN + widest } else { x },
            height: 0.0,
            blocks,
            trunks: bars,
        };
        let lines = layout.classes.len().max(layout.paths.len() + usize::from(layout.has_veto)).max(3);
        layout.height = layout.legend_y + LEGEND_LINE * f64::from(u16::try_from(lines).unwrap_or(u16::MAX));
        layout
    }

    /// What the machine is, in one line.
    pub(super) fn summary(&self, topology: &Topology) -> String {
        let devices = topology.devices().count();
        let nics = topology.endpoints().len() - devices;
        let is_gpu = |node: &Node| matches!(node.kind, NodeKind::Device { kind: DeviceKind::Gpu, .. });
        let word = if topology.devices().all(is_gpu) { "GPU" } else { "device" };
        let numbered = self.blocks.iter().flat_map(|block| &block.numas);
        let numas = numbered.filter(|numa| numa.number.is_some()).count();
        let mut parts = vec![counted(devices, word)];
        if nics > 0 {
            parts.push(counted(nics, "network card"));
        }
        if numas > 0 {
            parts.push(counted(numas, "NUMA node"));
        }
        if self.blocks.len() > 1 {
            parts.push(counted(self.blocks.len(), "machine"));
        }
        parts.join(", ")
    }
}

impl Block {
    /// Takes the bars from `bars` whose members are all on this machine.
    fn place(topology: &Topology, host: Option<String>, bars: &mut Vec<Bar>, y: f64) -> Self {
        let nodes: Vec<&Node> =
            topology.endpoints().into_iter().filter(|node| node.place.host == host).collect();
        let header = if host.is_some() { 28.0 } else { 0.0 };
        let inset = if host.is_some() { 14.0 } else { 0.0 };
        let memories: Vec<&Node> = topology
            .nodes()
            .iter()
            .filter(|node| matches!(node.kind, NodeKind::Host { .. }) && node.place.host == host)
            .collect();
        let numas = numas(topology, &nodes, &memories, MARGIN + inset);
        let right = numas.last().map_or(MARGIN, |numa| numa.x + numa.width);
        let mut block = Self {
            host,
            levels: levels(&numas),
            numas,
            bars: Vec::new(),
            arcs: Vec::new(),
            area: Area { x: MARGIN, y, width: right - MARGIN + inset, height: 0.0 },
            row_y: 0.0,
            floor_y: 0.0,
        };
        let is_here = |bar: &Bar| bar.members.iter().all(|member| block.spot(*member).is_some());
        let (own, others): (Vec<Bar>, Vec<Bar>) = std::mem::take(bars).into_iter().partition(is_here);
        *bars = others;
        block.arcs = arcs(topology, &own, &block);
        block.stack(own, y + header);
        block
    }

    /// Decides heights: bars on top, then arcs, devices, junctions and host bars.
    fn stack(&mut self, bars: Vec<Bar>, top: f64) {
        let mut y = top + 10.0;
        for mut bar in bars {
            let xs = || self.spots_of(&bar.members);
            let left = xs().map(|spot| spot.x - spot.width / 2.0).fold(f64::INFINITY, f64::min);
            let right = xs().map(|spot| spot.x + spot.width / 2.0).fold(0.0, f64::max);
            let wanted = text_width(&bar.text, 13) + 24.0;
            let middle = (left + right) / 2.0;
            let width = (right - left).max(wanted);
            bar.area = Area { x: (middle - width / 2.0).max(MARGIN), y, width, height: BAR_HEIGHT };
            y += BAR_HEIGHT + 18.0;
            self.bars.push(bar);
        }
        let tallest =
            self.arcs.iter().filter_map(|edge| self.arc(edge)).map(|arc| arc.height).fold(0.0, f64::max);
        self.row_y = y + tallest * ARC_RISE + 34.0;
        let depth = LEVEL * f64::from(u8::try_from(self.levels.len()).unwrap_or(u8::MAX));
        let has_hosts = self.numas.iter().any(|numa| numa.number.is_some());
        let host = if has_hosts { HOST_HEIGHT + 30.0 } else { 12.0 };
        self.floor_y = self.row_y + BOX_HEIGHT + depth + host;
        self.area.height = self.floor_y + 16.0 - self.area.y + if self.host.is_some() { 14.0 } else { 0.0 };
    }

    pub(super) fn spot(&self, node: NodeId) -> Option<&Spot> {
        let mut spots = self.numas.iter().flat_map(|numa| &numa.spots);
        spots.find(|spot| spot.node == node)
    }

    /// The spots of those of `nodes` that are on this machine.
    pub(super) fn spots_of(&self, nodes: &[NodeId]) -> impl Iterator<Item = &Spot> {
        nodes.iter().filter_map(|node| self.spot(*node))
    }

    /// Top of the host bars.
    pub(super) fn host_y(&self) -> f64 {
        self.floor_y - HOST_HEIGHT
    }

    /// Where the arc of a direct link runs.
    pub(super) fn arc(&self, edge: &Edge) -> Option<Arc> {
        let (a, b) = (self.spot(edge.from)?.x, self.spot(edge.to)?.x);
        let (left, right) = (a.min(b), a.max(b));
        // Arcs to the right leave right of the middle, so that they share no point with those to the left.
        Some(Arc { start: left + 12.0, end: right - 12.0, height: 40.0 + (right - left) * 0.32 })
    }

    /// The height of the junctions of one path class.
    pub(super) fn level_y(&self, path: PathClass) -> f64 {
        let index = self.levels.iter().position(|level| *level == path).unwrap_or_default();
        self.row_y + BOX_HEIGHT + LEVEL * (f64::from(u8::try_from(index).unwrap_or(u8::MAX)) + 0.75)
    }
}

fn numas(topology: &Topology, nodes: &[&Node], memories: &[&Node], left: f64) -> Vec<Numa> {
    let numbers: BTreeSet<(bool, Option<u32>)> = nodes
        .iter()
        .chain(memories)
        .map(|node| (node.place.numa_node.is_none(), node.place.numa_node))
        .collect();
    let mut x = left;
    let mut numas = Vec::new();
    for (_, number) in numbers {
        let near: Vec<&Node> = nodes.iter().copied().filter(|node| node.place.numa_node == number).collect();
        // Beyond the host bridge the host bar itself is the junction.
        let farthest = if number.is_some() { PathClass::Phb } else { PathClass::Sys };
        let trees = tree::group(topology, &near, farthest);
        let start = x;
        let mut offset = 14.0;
        let mut spots = Vec::new();
        for node in trees.iter().flat_map(Tree::leaves) {
            let width = box_width(&topology.nodes()[node.index()]);
            spots.push(Spot { node, x: start + offset + width / 2.0, width });
            offset += width + 10.0;
        }
        let wanted = offset + 4.0;
        let width = wanted.max(NUMA_WIDTH);
        for spot in &mut spots {
            spot.x += (width - wanted) / 2.0;
        }
        x = start + width + GAP + 14.0;
        numas.push(Numa {
            number,
            host: memories
                .iter()
                .find(|host| number.is_some() && host.place.numa_node == number)
                .map(|host| host.id),
            cpus: cpus(memories, number, &near),
            trees,
            spots,
            x: start,
            width,
        });
    }
    numas
}

fn box_width(node: &Node) -> f64 {
    let least = if node.is_device() { DEVICE_WIDTH } else { NIC_WIDTH };
    (text_width(short_name(node), 14) + 14.0).clamp(least, MAX_WIDTH)
}

/// The name without the machine in front, which the box around the machine shows.
pub(super) fn short_name(node: &Node) -> &str {
    let host = node.place.host.as_deref();
    host.and_then(|host| node.name.strip_prefix(host)?.strip_prefix('/')).unwrap_or(&node.name)
}

fn cpus(memories: &[&Node], number: Option<u32>, near: &[&Node]) -> Option<String> {
    let number = number?;
    let own = memories.iter().find(|host| host.place.numa_node == Some(number));
    let cpus = own
        .and_then(|host| host.place.cpus.as_ref())
        .or_else(|| near.iter().find_map(|node| node.place.cpus.as_ref()));
    cpus.map(ToString::to_string)
}

fn levels(numas: &[Numa]) -> Vec<PathClass> {
    let mut levels = BTreeSet::new();
    for tree in numas.iter().flat_map(|numa| &numa.trees) {
        tree.visit_paths(&mut |path| {
            levels.insert(path);
        });
    }
    levels.into_iter().collect()
}

fn paths(blocks: &[Block]) -> Vec<PathClass> {
    let mut paths: BTreeSet<PathClass> =
        blocks.iter().flat_map(|block| block.levels.iter().copied()).collect();
    let joins_hosts = |block: &Block| block.numas.iter().filter(|numa| numa.number.is_some()).count() > 1;
    if blocks.iter().any(joins_hosts) {
        paths.insert(PathClass::Sys);
    }
    paths.into_iter().collect()
}

fn classes(topology: &Topology) -> Vec<LinkClass> {
    let mut classes: Vec<LinkClass> = Vec::new();
    let mut all: Vec<LinkClass> = topology.edges().iter().map(|edge| edge.class.value).collect();
    all.sort_unstable();
    for class in all {
        let is_known = classes.iter().any(|known| super::medium(*known) == super::medium(class));
        if !is_known {
            classes.push(class);
        }
    }
    classes
}

/// Fabrics, full meshes of direct links, and switches.
fn bars(topology: &Topology) -> Vec<Bar> {
    let mut bars = Vec::new();
    for class in MESHES {
        let least = if class == LinkClass::NvSwitch { 2 } else { 5 };
        for members in topology.complete_groups(class, least) {
            let Some(edge) = topology.edge(members[0], members[1]) else {
                continue;
            };
            let is_even =
                |edge: &Edge| edge.class.value != class || edge.link_count == first_count(topology, &members);
            if members.iter().all(|member| topology.edges_from(*member).iter().all(is_even)) {
                bars.push(bar(class, members.clone(), edge.bandwidth(), group_text(edge, members.len())));
            }
        }
    }
    for switch in topology.nodes().iter().filter(|node| node.kind == NodeKind::Switch) {
        let edges = topology.edges_from(switch.id);
        let Some(edge) = edges.first() else { continue };
        let members = edges.iter().map(|edge| edge.to).collect();
        let text = format!("{}: {} per port", switch.name, figure(edge.bandwidth()));
        bars.push(bar(edge.class.value, members, edge.bandwidth(), text));
    }
    bars
}

fn first_count(topology: &Topology, members: &[NodeId]) -> Option<Known<u32>> {
    topology.edge(members[0], members[1])?.link_count
}

fn bar(class: LinkClass, members: Vec<NodeId>, bandwidth: Known<Bandwidth>, text: String) -> Bar {
    Bar { class, members, bandwidth, text, area: Area { x: 0.0, y: 0.0, width: 0.0, height: 0.0 } }
}

fn group_text(edge: &Edge, members: usize) -> String {
    let links = edge.link_count.map(|count| match count.value {
        1 => "1 link".to_owned(),
        count => format!("{count} links"),
    });
    let links = links.map_or_else(String::new, |links| format!("{links}, "));
    let rate = figure(edge.bandwidth());
    match edge.class.value {
        LinkClass::NvSwitch => {
            format!("NVSwitch fabric: every GPU has {links}{rate} per direction")
        }
        LinkClass::Unknown => format!("all {members} reach each other; how is not known"),
        class => {
            format!("{class} between all {members}, no switch: every pair has {links}{rate} per direction")
        }
    }
}

/// Pairs of devices that no bar and no PCI tree shows, and pairs that must not be used.
fn arcs(topology: &Topology, bars: &[Bar], block: &Block) -> Vec<Edge> {
    let in_bar = |edge: &Edge| {
        bars.iter().any(|bar| {
            bar.class == edge.class.value
                && bar.members.contains(&edge.from)
                && bar.members.contains(&edge.to)
        })
    };
    topology
        .joined_pairs()
        .filter(|edge| block.spot(edge.from).is_some() && block.spot(edge.to).is_some())
        .filter(|edge| edge.veto.is_some() || (edge.class.value != LinkClass::Pcie && !in_bar(edge)))
        .cloned()
        .collect()
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Cuts a text that would not fit.
pub(super) fn fit(text: &str, width: f64, size: u32) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars() {
        let longer = format!("{kept}{c}…");
        if text_width(&longer, size) > width {
            break;
        }
        kept.push(c);
    }
    kept.push('…');
    kept
}

/// The width of a text, near enough for common fonts.
pub(super) fn text_width(text: &str, size: u32) -> f64 {
    let letters = u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
    f64::from(letters) * f64::from(size) * 0.6
}

/// Media in which many devices can be joined all to all.
const MESHES: [LinkClass; 6] = [
    LinkClass::NvSwitch,
    LinkClass::NvLink,
    LinkClass::Xgmi,
    LinkClass::XeLink,
    LinkClass::HostMemory,
    LinkClass::Unknown,
];

pub(super) const MARGIN: f64 = 24.0;
pub(super) const BOX_HEIGHT: f64 = 58.0;
const BAR_HEIGHT: f64 = 32.0;
pub(super) const HOST_HEIGHT: f64 = 40.0;
pub(super) const PILL_HEIGHT: f64 = 16.0;
/// A cubic curve rises to three quarters of its control points.
pub(super) const ARC_RISE: f64 = 0.75;
pub(super) const LEGEND_LINE: f64 = 24.0;
const TITLE_HEIGHT: f64 = 70.0;
const GAP: f64 = 26.0;
const LEVEL: f64 = 34.0;
const DEVICE_WIDTH: f64 = 96.0;
const NIC_WIDTH: f64 = 80.0;
const MAX_WIDTH: f64 = 180.0;
/// Room for the name of a NUMA node.
const NUMA_WIDTH: f64 = 200.0;
const MIN_WIDTH: f64 = 860.0;
