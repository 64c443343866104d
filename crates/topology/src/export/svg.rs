//! A picture for people who have never seen a topology matrix.
//!
//! Devices and network cards stand in a row, in one box per NUMA node.
//! Fast links are above them: a fabric is a bar with one line per device, a direct link an arc.
//! The PCI tree is below: the nearer a junction is to two devices, the nearer they are to each other.

mod canvas;
mod layout;

use warpweft_core_types::{Bandwidth, LinkClass, Provenance};

use self::{
    canvas::{Anchor, Canvas, Stroke},
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
        let mut picture = Picture {
            topology: self,
            canvas: Canvas::default(),
        };
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
        self.canvas.text(x, 34.0, Anchor::Start, 20, INK, &counts);
        let hint = "Fast links are drawn above the devices, PCI Express below: the sooner two lines meet, the nearer the devices.";
        self.canvas.text(x, 54.0, Anchor::Start, 12, SOFT, hint);
    }

    fn block(&mut self, block: &Block) {
        if let Some(host) = &block.host {
            self.canvas.panel(
                block.x,
                block.y,
                block.width,
                block.height,
                "#ffffff",
                "#cbd5e1",
            );
            self.canvas
                .text(block.x + 12.0, block.y + 20.0, Anchor::Start, 14, INK, host);
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
        let (top, bottom) = (block.row_y - 30.0, block.floor_y + 16.0);
        self.canvas
            .panel(numa.x, top, numa.width, bottom - top, "#f8fafc", "#dbe3ec");
        let Some(number) = numa.number else { return };
        let bar_y = block.floor_y - layout::HOST_HEIGHT;
        let (x, width) = (numa.x + 10.0, numa.width - 20.0);
        self.canvas.panel(
            x,
            bar_y,
            width,
            layout::HOST_HEIGHT,
            "#fdf3e1",
            colour(LinkClass::HostMemory),
        );
        let name = format!("NUMA {number}: CPU and memory");
        let middle = x + width / 2.0;
        let line = bar_y + if numa.cpus.is_some() { 17.0 } else { 23.0 };
        self.canvas.text(
            middle,
            line,
            Anchor::Middle,
            12,
            INK,
            &layout::fit(&name, width - 8.0, 12),
        );
        if let Some(cpus) = &numa.cpus {
            let cpus = layout::fit(&format!("CPUs {cpus}"), width - 8.0, 10);
            self.canvas
                .text(middle, bar_y + 31.0, Anchor::Middle, 10, SOFT, &cpus);
        }
    }

    /// Lines between the memories of neighbouring NUMA nodes, where they are linked.
    fn host_links(&mut self, block: &Block) {
        let numbered: Vec<&Numa> = block
            .numas
            .iter()
            .filter(|numa| numa.number.is_some())
            .collect();
        for pair in numbered.windows(2) {
            let (Some(a), Some(b)) = (pair[0].host, pair[1].host) else {
                continue;
            };
            let Some(edge) = self.topology.either_edge(a, b) else {
                continue;
            };
            let y = block.floor_y - layout::HOST_HEIGHT / 2.0;
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
        let stroke_colour = colour(bar.class);
        for member in &bar.members {
            let Some(spot) = block.spot(*member) else {
                continue;
            };
            let stroke = Stroke::new(stroke_colour, width_of(bar.bandwidth));
            self.canvas.line(
                spot.x,
                bar.y + layout::BAR_HEIGHT,
                spot.x,
                block.row_y,
                &stroke,
            );
        }
        let fill = "#ffffff";
        self.canvas.panel(
            bar.x,
            bar.y,
            bar.width,
            layout::BAR_HEIGHT,
            fill,
            stroke_colour,
        );
        let text = layout::fit(&bar.text, bar.width - 12.0, 13);
        self.canvas.text(
            bar.x + bar.width / 2.0,
            bar.y + 21.0,
            Anchor::Middle,
            13,
            INK,
            &text,
        );
    }

    fn arc(&mut self, edge: &Edge, block: &Block) {
        if let Some(arc) = block.arc(edge) {
            let stroke = arc_stroke(edge);
            self.canvas.arc(
                arc.start,
                arc.end,
                block.row_y,
                block.row_y - arc.height,
                &stroke,
            );
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
        let colour = arc_stroke(edge).colour;
        let (x, y) = (
            (arc.start + arc.end) / 2.0,
            block.row_y - arc.height * layout::ARC_RISE,
        );
        self.canvas.pill(x, y, colour, &word);
    }

    fn trees(&mut self, block: &Block, numa: &Numa) {
        for tree in &numa.trees {
            let (x, y) = self.tree(block, tree);
            if numa.number.is_some() {
                let end = block.floor_y - layout::HOST_HEIGHT;
                let stroke = Stroke::new(colour(LinkClass::Pcie), self.pcie_width(tree));
                self.canvas.line(x, y, x, end, &stroke);
                self.direct_host_link(tree, x, y, end);
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
        let ends: Vec<f64> = parts
            .iter()
            .map(|part| {
                let (x, top) = self.tree(block, part);
                let stroke = Stroke::new(colour(LinkClass::Pcie), self.pcie_width(part));
                self.canvas.line(x, top, x, y, &stroke);
                x
            })
            .collect();
        let left = ends.iter().copied().fold(f64::INFINITY, f64::min);
        let right = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let stroke = Stroke::new(colour(LinkClass::Pcie), 3.0);
        self.canvas.line(left, y, right, y, &stroke);
        let middle = (left + right) / 2.0;
        self.canvas
            .pill(middle, y, colour(LinkClass::Pcie), &path.to_string());
        (middle, y + layout::PILL_HEIGHT / 2.0)
    }

    /// A chip-to-chip link bypasses the PCI tree on its way to the processor.
    fn direct_host_link(&mut self, tree: &Tree, x: f64, y: f64, end: f64) {
        let Tree::Leaf(node) = tree else { return };
        let edges = self.topology.edges_from(*node).iter();
        let direct = edges.clone().find(|edge| {
            let is_host = self
                .topology
                .node(edge.to)
                .is_some_and(|to| !to.is_device());
            is_host
                && matches!(
                    edge.class.value,
                    LinkClass::NvLinkC2c | LinkClass::NvLink | LinkClass::Xgmi
                )
        });
        if let Some(edge) = direct {
            let stroke = Stroke::new(colour(edge.class.value), width_of(edge.bandwidth()));
            self.canvas.line(x, y, x, end, &stroke);
            self.canvas
                .pill(x, (y + end) / 2.0, stroke.colour, &edge_word(edge));
        }
    }

    fn pcie_width(&self, tree: &Tree) -> f64 {
        let rates = tree
            .leaves()
            .into_iter()
            .filter_map(|node| self.pcie_bandwidth(node));
        let fastest = rates.map(|rate| rate.gb_per_s).reduce(f64::max);
        fastest.map_or(2.0, width)
    }

    /// The device's PCIe bandwidth, where it is known.
    fn pcie_bandwidth(&self, id: NodeId) -> Option<Bandwidth> {
        let node = self.topology.node(id)?;
        let own = node.place.pcie.and_then(|link| link.bandwidth());
        own.or_else(|| {
            let host = self.topology.host(node.place.numa_node?)?;
            let edge = self.topology.edge(id, host)?;
            edge.nominal.map(|known| known.value)
        })
    }

    fn endpoint(&mut self, block: &Block, spot: &Spot) {
        let Some(node) = self.topology.node(spot.node) else {
            return;
        };
        let (fill, border) = if node.is_device() {
            ("#e3f5e1", "#3f8f1f")
        } else {
            ("#ede9fe", "#7c3aed")
        };
        let left = spot.x - spot.width / 2.0;
        self.canvas.panel(
            left,
            block.row_y,
            spot.width,
            layout::BOX_HEIGHT,
            fill,
            border,
        );
        let lines = self.endpoint_lines(node);
        let first = block.row_y + if lines.len() > 1 { 20.0 } else { 30.0 };
        for (index, (size, ink, line)) in lines.iter().enumerate() {
            let y = first + [0.0, 15.0, 28.0][index.min(2)];
            let text = layout::fit(line, spot.width - 6.0, *size);
            self.canvas
                .text(spot.x, y, Anchor::Middle, *size, ink, &text);
        }
    }

    fn endpoint_lines(&self, node: &Node) -> Vec<(u32, &'static str, String)> {
        let mut lines = vec![(14, INK, layout::short_name(node).to_owned())];
        if let Some(model) = &node.model {
            lines.push((10, SOFT, model.clone()));
        } else if let Some(pci) = node.place.pci {
            lines.push((10, SOFT, pci.to_string()));
        }
        if let Some(rate) = self.pcie_bandwidth(node.id) {
            lines.push((10, SOFT, format!("PCIe {:.0} GB/s", rate.gb_per_s)));
        }
        lines
    }

    /// A switch that joins several machines: a line along all of them.
    fn trunk(&mut self, bar: &Bar, layout: &Layout) {
        let stroke = Stroke::new(colour(bar.class), 4.0);
        let mut ends = Vec::new();
        for block in &layout.blocks {
            let members = bar.members.iter().filter_map(|member| block.spot(*member));
            let Some(right) = members.map(|spot| spot.x).reduce(f64::max) else {
                continue;
            };
            let count = bar
                .members
                .iter()
                .filter(|member| block.spot(**member).is_some())
                .count();
            let y = block.row_y - 14.0;
            for spot in bar.members.iter().filter_map(|member| block.spot(*member)) {
                self.canvas.line(
                    spot.x,
                    y,
                    spot.x,
                    block.row_y,
                    &Stroke::new(colour(bar.class), 1.5),
                );
            }
            let left = bar
                .members
                .iter()
                .filter_map(|member| block.spot(*member))
                .map(|spot| spot.x)
                .fold(right, f64::min);
            self.canvas.line(left, y, bar.x, y, &stroke);
            self.canvas
                .pill(bar.x - 24.0, y, colour(bar.class), &format!("{count}x"));
            ends.push(y);
        }
        let top = ends.iter().copied().fold(f64::INFINITY, f64::min);
        let bottom = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if top.is_finite() {
            self.canvas.line(
                bar.x,
                top,
                bar.x,
                bottom,
                &Stroke::new(colour(bar.class), 8.0),
            );
            self.canvas
                .vertical_text(bar.x + 16.0, (top + bottom) / 2.0, 12, INK, &bar.text);
        }
    }

    fn legend(&mut self, layout: &Layout) {
        let mut y = layout.legend_y;
        let x = layout::MARGIN;
        for class in &layout.classes {
            self.canvas
                .line(x, y, x + 40.0, y, &Stroke::new(colour(*class), 6.0));
            let text = medium(*class);
            self.canvas
                .text(x + 52.0, y + 4.0, Anchor::Start, 12, INK, text);
            y += layout::LEGEND_LINE;
        }
        let mut y = layout.legend_y;
        let x = layout::MARGIN + 320.0;
        for path in &layout.paths {
            self.canvas
                .pill(x + 20.0, y, colour(LinkClass::Pcie), &path.to_string());
            self.canvas
                .text(x + 52.0, y + 4.0, Anchor::Start, 12, INK, explain(*path));
            y += layout::LEGEND_LINE;
        }
        if layout.has_veto {
            self.canvas
                .line(x, y, x + 40.0, y, &Stroke::new(VETO, 2.0).dashed());
            self.canvas.text(
                x + 52.0,
                y + 4.0,
                Anchor::Start,
                12,
                INK,
                "must not be used",
            );
        }
        let mut y = layout.legend_y;
        let x = layout::MARGIN + 650.0;
        for gb_per_s in [8.0, 64.0, 450.0] {
            self.canvas
                .line(x, y, x + 40.0, y, &Stroke::new(SOFT, width(gb_per_s)));
            let text = format!("{gb_per_s:.0} GB/s in one direction");
            self.canvas
                .text(x + 52.0, y + 4.0, Anchor::Start, 12, INK, &text);
            y += layout::LEGEND_LINE;
        }
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
const VETO: &str = "#dc2626";
