//! A picture for people who have never seen a topology matrix.
//!
//! Devices and network cards stand in a row, in one box per NUMA node.
//! Fast links are above them: a fabric is a bar with one line per device, a direct link an arc.
//! The PCI tree is below: the nearer a junction is to two devices, the nearer they are to each other.

mod canvas;
mod layout;

use warpweft_core_types::{Bandwidth, LinkClass, Provenance};

use self::{
    canvas::{Area, Canvas, Stroke, Type},
    layout::{Bar, Block, Layout, Numa, Spot},
};
use super::{colour, matrix::explain, tree::Tree};
use crate::{Edge, Known, Node, NodeId, Topology, import::edge_word};

impl Topology {
    /// The topology as a picture: standalone SVG with a light background.
    ///
    /// Colour tells the medium, thickness the bandwidth; a legend explains both. All names are escaped.
    pub fn to_svg(&self) -> String {
        let layout = Layout::of(self);
        let mut picture = Picture { topology: self, canvas: Canvas::default() };
        picture.title(&layout);
        for block in &layout.blocks {
            picture.block(block);
        }
        for bar in &layout.trunks {
            picture.trunk(bar, &layout);
        }
        picture.legend(&layout);
        picture.canvas.finish(layout.width, layout.height)
    }
}

struct Picture<'t> {
    topology: &'t Topology,
    canvas: Canvas,
}

impl Picture<'_> {
    fn title(&mut self, layout: &Layout) {
        let counts = layout.summary(self.topology);
        let x = layout::MARGIN;
        self.canvas.text(x, 34.0, Type::from(20, INK), &counts);
        let hint = "Fast links are drawn above the devices, PCI Express below: the sooner two lines meet, the nearer the devices.";
        self.canvas.text(x, 54.0, Type::from(12, SOFT), hint);
    }

    fn block(&mut self, block: &Block) {
        if let Some(host) = &block.host {
            self.canvas.panel(block.area, PAPER, "#cbd5e1");
            let (x, y) = (block.area.x + 12.0, block.area.y + 20.0);
            self.canvas.text(x, y, Type::from(14, INK), host);
        }
        for numa in &block.numas {
            self.numa_box(block, numa);
        }
        self.host_links(block);
        for bar in &block.bars {
            self.bar(bar, block);
        }
        // Labels come last, so that no line crosses one.
        for edge in &block.arcs {
            self.arc(edge, block);
        }
        for edge in &block.arcs {
            self.arc_label(edge, block);
        }
        for numa in &block.numas {
            self.trees(block, numa);
            for spot in &numa.spots {
                self.endpoint(block, spot);
            }
        }
    }

    fn numa_box(&mut self, block: &Block, numa: &Numa) {
        let top = block.row_y - 30.0;
        let around = Area { x: numa.x, y: top, width: numa.width, height: block.floor_y + 16.0 - top };
        self.canvas.panel(around, "#f8fafc", "#dbe3ec");
        let Some(number) = numa.number else { return };
        let bar = Area {
            x: numa.x + 10.0,
            y: block.host_y(),
            width: numa.width - 20.0,
            height: layout::HOST_HEIGHT,
        };
        self.canvas.panel(bar, "#fdf3e1", colour(LinkClass::HostMemory));
        let name = format!("NUMA {number}: CPU and memory");
        let name_y = bar.y + if numa.cpus.is_some() { 17.0 } else { 23.0 };
        self.fitted(bar, name_y, Type::around(12, INK), &name);
        if let Some(cpus) = &numa.cpus {
            let cpus = format!("CPUs {cpus}");
            self.fitted(bar, bar.y + 31.0, Type::around(10, SOFT), &cpus);
        }
    }

    /// A text in the middle of an area, cut where it would not fit.
    fn fitted(&mut self, area: Area, y: f64, face: Type, text: &str) {
        let text = layout::fit(text, area.width - 6.0, face.size);
        self.canvas.text(area.middle(), y, face, &text);
    }

    /// Lines between the memories of neighbouring NUMA nodes, where they are linked.
    fn host_links(&mut self, block: &Block) {
        let numbered: Vec<&Numa> = block.numas.iter().filter(|numa| numa.number.is_some()).collect();
        for pair in numbered.windows(2) {
            let (Some(a), Some(b)) = (pair[0].host, pair[1].host) else {
                continue;
            };
            let Some(edge) = self.topology.either_edge(a, b) else {
                continue;
            };
            let y = block.host_y() + layout::HOST_HEIGHT / 2.0;
            let (from, to) = (pair[0].x + pair[0].width - 10.0, pair[1].x + 10.0);
            let colour = colour(edge.class.value);
            self.canvas.line(from, y, to, y, &Stroke::new(colour, 5.0));
            let word = edge.path.map(|path| path.value.to_string());
            let word = word.unwrap_or_else(|| edge_word(edge));
            self.canvas.pill((from + to) / 2.0, y - 12.0, colour, &word);
        }
    }

    /// A fabric, a full mesh or a switch, with a line from each member.
    fn bar(&mut self, bar: &Bar, block: &Block) {
        let colour = colour(bar.class);
        let stroke = Stroke::new(colour, width_of(bar.bandwidth));
        let bottom = bar.area.y + bar.area.height;
        for spot in block.spots_of(&bar.members) {
            self.canvas.line(spot.x, bottom, spot.x, block.row_y, &stroke);
        }
        self.canvas.panel(bar.area, PAPER, colour);
        let face = Type::around(13, INK);
        self.fitted(bar.area, bar.area.y + 21.0, face, &bar.text);
    }

    fn arc(&mut self, edge: &Edge, block: &Block) {
        if let Some(arc) = block.arc(edge) {
            let (y, top) = (block.row_y, block.row_y - arc.height);
            self.canvas.arc(arc.start, arc.end, y, top, &arc_stroke(edge));
        }
    }

    fn arc_label(&mut self, edge: &Edge, block: &Block) {
        let Some(arc) = block.arc(edge) else { return };
        let word = edge_word(edge);
        let count = edge.link_count.map(|count| count.value);
        let word = match (&edge.veto, count) {
            (Some(_), _) => "no".to_owned(),
            (None, Some(count)) if word == "NV" => format!("NV{count}"),
            (None, Some(count)) if count > 1 => format!("{word} x{count}"),
            _ => word,
        };
        let y = block.row_y - arc.height * layout::ARC_RISE;
        let colour = arc_stroke(edge).colour;
        self.canvas.pill((arc.start + arc.end) / 2.0, y, colour, &word);
    }

    fn trees(&mut self, block: &Block, numa: &Numa) {
        for tree in &numa.trees {
            let (x, y) = self.tree(block, tree);
            if numa.number.is_some() {
                let stroke = Stroke::new(colour(LinkClass::Pcie), self.pcie_width(tree));
                self.canvas.line(x, y, x, block.host_y(), &stroke);
            }
        }
        if let Some(host) = numa.host {
            for spot in &numa.spots {
                self.direct_host_link(block, spot, host);
            }
        }
    }

    /// Draws a junction with everything above it; returns the point where it continues downwards.
    fn tree(&mut self, block: &Block, tree: &Tree) -> (f64, f64) {
        let (path, parts) = match tree {
            Tree::Leaf(node) => {
                let x = block.spot(*node).map_or(0.0, |spot| spot.x);
                return (x, block.row_y + layout::BOX_HEIGHT);
            }
            Tree::Join { path, parts } => (*path, parts),
        };
        let y = block.level_y(path);
        let (mut left, mut right) = (f64::INFINITY, f64::NEG_INFINITY);
        for part in parts {
            let (x, top) = self.tree(block, part);
            let stroke = Stroke::new(colour(LinkClass::Pcie), self.pcie_width(part));
            self.canvas.line(x, top, x, y, &stroke);
            (left, right) = (left.min(x), right.max(x));
        }
        let pcie = colour(LinkClass::Pcie);
        self.canvas.line(left, y, right, y, &Stroke::new(pcie, 3.0));
        let middle = (left + right) / 2.0;
        self.canvas.pill(middle, y, pcie, &path.to_string());
        (middle, y + layout::PILL_HEIGHT / 2.0)
    }

    /// A chip-to-chip link goes to the processor beside the PCI tree.
    fn direct_host_link(&mut self, block: &Block, spot: &Spot, host: NodeId) {
        let edge = self.topology.either_edge(spot.node, host);
        let Some(edge) = edge.filter(|edge| edge.class.value != LinkClass::Pcie) else {
            return;
        };
        let x = spot.x - spot.width * 0.3;
        let (top, bottom) = (block.row_y + layout::BOX_HEIGHT, block.host_y());
        let stroke = Stroke::new(colour(edge.class.value), width_of(edge.bandwidth()));
        self.canvas.line(x, top, x, bottom, &stroke);
        self.canvas.pill(x, bottom - 14.0, stroke.colour, &edge_word(edge));
    }

    fn pcie_width(&self, tree: &Tree) -> f64 {
        let rates = tree.leaves().into_iter().filter_map(|node| self.pcie_bandwidth(node));
        let fastest = rates.map(|rate| rate.gb_per_s).reduce(f64::max);
        fastest.map_or(2.0, width)
    }

    /// The device's PCIe bandwidth, where it is known.
    fn pcie_bandwidth(&self, id: NodeId) -> Option<Bandwidth> {
        let node = self.topology.node(id)?;
        let own = node.place.pcie.and_then(|link| link.bandwidth());
        own.or_else(|| {
            let edge = self.topology.edge(id, self.topology.nearest_host(id)?)?;
            let nominal = edge.nominal.map(|known| known.value);
            nominal.filter(|_| edge.class.value == LinkClass::Pcie)
        })
    }

    fn endpoint(&mut self, block: &Block, spot: &Spot) {
        let Some(node) = self.topology.node(spot.node) else {
            return;
        };
        let (fill, border) = if node.is_device() { ("#e3f5e1", "#3f8f1f") } else { ("#ede9fe", "#7c3aed") };
        let area = Area {
            x: spot.x - spot.width / 2.0,
            y: block.row_y,
            width: spot.width,
            height: layout::BOX_HEIGHT,
        };
        self.canvas.panel(area, fill, border);
        let details = self.details(node);
        let name_y = block.row_y + if details.is_empty() { 33.0 } else { 20.0 };
        let name = layout::short_name(node);
        self.fitted(area, name_y, Type::around(14, INK), name);
        for (line, y) in details.iter().zip([35.0, 48.0]) {
            self.fitted(area, block.row_y + y, Type::around(10, SOFT), line);
        }
    }

    fn details(&self, node: &Node) -> Vec<String> {
        let pci = node.place.pci.map(|pci| pci.to_string());
        let rate = self.pcie_bandwidth(node.id);
        let rate = rate.map(|rate| format!("PCIe {:.0} GB/s", rate.gb_per_s));
        node.model.clone().or(pci).into_iter().chain(rate).collect()
    }

    /// A switch that joins several machines: a line along all of them.
    fn trunk(&mut self, bar: &Bar, layout: &Layout) {
        let x = bar.area.x;
        let (mut top, mut bottom) = (f64::INFINITY, f64::NEG_INFINITY);
        for block in &layout.blocks {
            if let Some(y) = self.branch(bar, block) {
                (top, bottom) = (top.min(y), bottom.max(y));
            }
        }
        if top <= bottom {
            let stroke = Stroke::new(colour(bar.class), 8.0);
            self.canvas.line(x, top, x, bottom, &stroke);
            let face = Type::around(12, INK);
            self.canvas.vertical_text(x + 16.0, (top + bottom) / 2.0, face, &bar.text);
        }
    }

    /// The line from a trunk to its members on one machine; returns its height.
    fn branch(&mut self, bar: &Bar, block: &Block) -> Option<f64> {
        let y = block.row_y - 14.0;
        let xs: Vec<f64> = block.spots_of(&bar.members).map(|spot| spot.x).collect();
        let left = xs.iter().copied().reduce(f64::min)?;
        let colour = colour(bar.class);
        for &x in &xs {
            let stroke = Stroke::new(colour, 1.5);
            self.canvas.line(x, y, x, block.row_y, &stroke);
        }
        let end = bar.area.x;
        self.canvas.line(left, y, end, y, &Stroke::new(colour, 4.0));
        let count = format!("{}x", xs.len());
        self.canvas.pill(end - 24.0, y, colour, &count);
        Some(y)
    }

    fn legend(&mut self, layout: &Layout) {
        let line = |index: u32| layout.legend_y + layout::LEGEND_LINE * f64::from(index);
        let x = layout::MARGIN;
        for (index, class) in (0..).zip(&layout.classes) {
            let stroke = Stroke::new(colour(*class), 6.0);
            self.legend_line(x, line(index), &stroke, medium(*class));
        }
        let x = layout::MARGIN + 320.0;
        let mut used = 0;
        for path in &layout.paths {
            let y = line(used);
            let pcie = colour(LinkClass::Pcie);
            self.canvas.pill(x + 20.0, y, pcie, &path.to_string());
            self.legend_text(x, y, explain(*path));
            used += 1;
        }
        if layout.has_veto {
            let stroke = Stroke::new(VETO, 2.0).dashed();
            self.legend_line(x, line(used), &stroke, "must not be used");
        }
        let x = layout::MARGIN + 650.0;
        for (index, gb_per_s) in (0..).zip([8.0, 64.0, 450.0]) {
            let stroke = Stroke::new(SOFT, width(gb_per_s));
            let text = format!("{gb_per_s:.0} GB/s in one direction");
            self.legend_line(x, line(index), &stroke, &text);
        }
    }

    fn legend_line(&mut self, x: f64, y: f64, stroke: &Stroke, text: &str) {
        self.canvas.line(x, y, x + 40.0, y, stroke);
        self.legend_text(x, y, text);
    }

    fn legend_text(&mut self, x: f64, y: f64, text: &str) {
        self.canvas.text(x + 52.0, y + 4.0, Type::from(12, INK), text);
    }
}

fn medium(class: LinkClass) -> &'static str {
    match class {
        LinkClass::NvLink | LinkClass::NvSwitch => "NVLink",
        LinkClass::NvLinkC2c => "NVLink chip to chip",
        LinkClass::Xgmi => "xGMI (Infinity Fabric)",
        LinkClass::XeLink => "Xe Link",
        LinkClass::Pcie => "PCI Express",
        LinkClass::HostMemory => "host memory and processor interconnect",
        LinkClass::Network => "network",
        LinkClass::SameDevice => "same card",
        _ => "linked in an unknown way",
    }
}

fn arc_stroke(edge: &Edge) -> Stroke {
    match edge.veto {
        Some(_) => Stroke::new(VETO, 2.0).dashed(),
        None => Stroke::new(colour(edge.class.value), width_of(edge.bandwidth())),
    }
}

fn width_of(bandwidth: Known<Bandwidth>) -> f64 {
    width(bandwidth.value.gb_per_s)
}

/// Thickness of a line: four times the bandwidth doubles it, roughly.
fn width(gb_per_s: f64) -> f64 {
    (gb_per_s.max(1.0).powf(0.42) * 0.75).clamp(1.2, 12.0)
}

/// A bandwidth for a label, marked if nobody stated it.
fn figure(bandwidth: Known<Bandwidth>) -> String {
    let gb_per_s = bandwidth.value.gb_per_s;
    match bandwidth.provenance {
        Provenance::Assumed => format!("about {gb_per_s:.0} GB/s (assumed)"),
        Provenance::Measured => format!("{gb_per_s:.0} GB/s (measured)"),
        _ => format!("{gb_per_s:.0} GB/s"),
    }
}

const INK: &str = "#0f172a";
const SOFT: &str = "#475569";
const PAPER: &str = "#ffffff";
const VETO: &str = "#dc2626";
