//! The matrix that `nvidia-smi topo -m` made familiar, for any vendor's devices.

use std::collections::BTreeSet;

use warpweft_core_types::{LinkClass, PathClass};

use crate::{Edge, Node, NodeKind, Topology};

impl Topology {
    /// The pairs as a text table: devices and network cards as rows and columns, then affinities and a legend of the words used.
    ///
    /// A matrix of NVIDIA links and PCIe paths can be imported again, unless a pair must not be used.
    /// Blanks in names become underscores, so that a name stays one word.
    pub fn to_matrix(&self) -> String {
        let endpoints = self.endpoints();
        let has_affinity = endpoints.iter().any(|node| node.is_device());
        let mut words = BTreeSet::new();
        let mut rows = vec![header(&endpoints)];
        for row in &endpoints {
            let mut cells = vec![label(row)];
            for column in &endpoints {
                let word = self.word(row, column);
                words.insert(word.clone());
                cells.push(word);
            }
            if row.is_device() {
                cells.extend(affinities(row));
            }
            rows.push(cells);
        }
        if !has_affinity {
            for row in &mut rows {
                row.truncate(endpoints.len() + 1);
            }
        }
        let mut text = align(&rows);
        text.push_str(&legend(&words));
        text.push_str(&nic_legend(&endpoints));
        text
    }

    fn word(&self, a: &Node, b: &Node) -> String {
        if a.id == b.id {
            return "X".to_owned();
        }
        self.either_edge(a.id, b.id).map_or_else(|| "-".to_owned(), edge_word)
    }
}

fn edge_word(edge: &Edge) -> String {
    let count = edge.link_count.map(|count| count.value);
    let counted = |word: &str| match count {
        Some(count) => format!("{word}{count}"),
        None => format!("{word}?"),
    };
    if edge.veto.is_some() {
        return "no".to_owned();
    }
    match edge.class.value {
        LinkClass::NvLink | LinkClass::NvSwitch => counted("NV"),
        LinkClass::Xgmi => counted("XG"),
        LinkClass::XeLink => counted("XL"),
        LinkClass::NvLinkC2c => "C2C".to_owned(),
        LinkClass::SameDevice => "MDF".to_owned(),
        LinkClass::HostMemory => "MEM".to_owned(),
        LinkClass::Network => "NET".to_owned(),
        class => match (edge.path, class) {
            (Some(path), _) => path.value.to_string(),
            (None, LinkClass::Pcie) => "PCIE".to_owned(),
            (None, _) => "?".to_owned(),
        },
    }
}

fn header(endpoints: &[&Node]) -> Vec<String> {
    let labels = endpoints.iter().map(|node| label(node));
    let extras = ["CPU Affinity", "NUMA Affinity"].map(str::to_owned);
    [String::new()].into_iter().chain(labels).chain(extras).collect()
}

fn label(node: &Node) -> String {
    node.name.split_whitespace().collect::<Vec<_>>().join("_")
}

fn affinities(node: &Node) -> [String; 2] {
    let place = &node.place;
    let or_nothing = |value: Option<String>| value.unwrap_or_else(|| "N/A".to_owned());
    [
        or_nothing(place.cpus.as_ref().map(ToString::to_string)),
        or_nothing(place.numa_node.map(|numa_node| numa_node.to_string())),
    ]
}

fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Explains the words that occur, and only those.
fn legend(words: &BTreeSet<String>) -> String {
    let uses = |prefix: &str| {
        let counts = |word: &String| {
            word.strip_prefix(prefix).is_some_and(|count| count == "?" || count.parse::<u32>().is_ok())
        };
        words.iter().any(counts)
    };
    let entries = [
        (true, "X", "the device itself"),
        (uses("NV"), "NV#", "# bonded NVLinks; through a switch, the links of one device"),
        (uses("XG"), "XG#", "# xGMI links (Infinity Fabric)"),
        (uses("XL"), "XL#", "# lanes of Xe Link"),
        (words.contains("C2C"), "C2C", "NVLink chip to chip"),
        (words.contains("MDF"), "MDF", "another part of the same card"),
        (words.contains("MEM"), "MEM", "memory of one host"),
        (words.contains("NET"), "NET", "a network"),
        (words.contains("PIX"), "PIX", explain(PathClass::Pix)),
        (words.contains("PXB"), "PXB", explain(PathClass::Pxb)),
        (words.contains("PHB"), "PHB", explain(PathClass::Phb)),
        (words.contains("NODE"), "NODE", explain(PathClass::Node)),
        (words.contains("SYS"), "SYS", explain(PathClass::Sys)),
        (words.contains("PCIE"), "PCIE", "PCI Express, by an unknown path"),
        (words.contains("?"), "?", "they reach each other; how is not known"),
        (words.contains("no"), "no", "must not be used: refused by the driver, or it delivered wrong bytes"),
        (words.contains("-"), "-", "no link is known"),
    ];
    let mut text = "\nLegend:\n\n".to_owned();
    for (_, word, meaning) in entries.into_iter().filter(|(is_used, ..)| *is_used) {
        text.push_str(&format!("  {word:<5}= {meaning}\n"));
    }
    text
}

/// What a path class means, in a few words.
pub(super) fn explain(path: PathClass) -> &'static str {
    match path {
        PathClass::Pix => "at most one PCIe switch",
        PathClass::Pxb => "several PCIe switches, no host bridge",
        PathClass::Phb => "through a PCIe host bridge (a CPU)",
        PathClass::Node => "between host bridges of one NUMA node",
        PathClass::Sys => "between NUMA nodes",
    }
}

fn nic_legend(endpoints: &[&Node]) -> String {
    let names: Vec<String> = endpoints
        .iter()
        .filter(|node| matches!(node.kind, NodeKind::Nic))
        .filter_map(|node| Some(format!("  {}: {}\n", label(node), node.model.as_ref()?)))
        .collect();
    if names.is_empty() {
        return String::new();
    }
    format!("\nNIC Legend:\n\n{}", names.concat())
}
