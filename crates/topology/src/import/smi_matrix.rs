//! `nvidia-smi topo -m`: how every GPU and network card is joined to every other.
//!
//! Layouts since 2015: `SOC` for what is now `SYS`; `NODE` added; the `NUMA Affinity` column; NICs renamed to `NICn` with a legend; the `GPU NUMA ID` column.

use warpweft_core_types::{LinkClass, PathClass};

use super::{
    Fault, Format, ImportError, Imported, Labelled, Printed, Report, ReportLink,
    error::token,
    table::{Dialect, Extra, Table, is_gpu, is_header},
    text,
};
use crate::{BuildError, CpuList, DeviceKind, LinkDesc, NodeDesc, NodeKind, Provenance, Topology};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let mut lines = text::numbered(text);
    let table = Table::read(&mut lines, &DIALECT)?.ok_or_else(|| ImportError::no_table(text))?;
    let columns = printed_columns(&table)?;
    let nic_names = legend(lines.clone());
    let mut report = report(&table, columns, nic_names);
    report.warnings.extend(second_table(lines));
    let topology = topology(&table, &report)
        .map_err(|source| ImportError::Build { format: Format::SmiMatrix, source })?;
    Ok(Imported { topology, report })
}

/// Whether a cell can join two devices in this table.
pub(super) fn is_code(word: &str) -> bool {
    parse_code(word).is_some()
}

const DIALECT: Dialect = Dialect { format: Format::SmiMatrix, mark: "X", is_code };

/// A cell: bonded NVLinks, or the way through the PCI tree.
#[derive(Clone, Copy)]
enum Code {
    NvLinks(u32),
    Path(PathClass),
}

fn parse_code(word: &str) -> Option<Code> {
    Some(Code::Path(match word {
        "PIX" => PathClass::Pix,
        "PXB" => PathClass::Pxb,
        "PHB" => PathClass::Phb,
        "NODE" => PathClass::Node,
        "SYS" | "SOC" => PathClass::Sys,
        _ => return parse_nvlinks(word).map(Code::NvLinks),
    }))
}

fn parse_nvlinks(word: &str) -> Option<u32> {
    let count = word.strip_prefix("NV")?;
    let plain = count.bytes().all(|byte| byte.is_ascii_digit()) && !count.starts_with('0');
    plain.then(|| count.parse().ok()).flatten()
}

/// The columns beside the matrix, with a value for every GPU.
fn printed_columns(table: &Table<'_>) -> Result<Vec<(Extra, Labelled<Printed>)>, ImportError> {
    let mut columns = Vec::new();
    for (index, &extra) in table.extras.iter().enumerate() {
        let mut values = Vec::new();
        for (label, row) in table.labels.iter().zip(&table.rows) {
            let Some(row) = row.as_ref().filter(|_| is_gpu(label)) else {
                continue;
            };
            let value = printed(extra, row.rest.get(index).copied(), label)
                .map_err(|fault| fault.at(Format::SmiMatrix, row.line))?;
            values.push(((*label).to_owned(), value));
        }
        columns.push((extra, Labelled(values)));
    }
    Ok(columns)
}

fn printed(extra: Extra, cell: Option<&str>, label: &str) -> Result<Printed, Fault> {
    let value = Printed::cell(cell);
    let (name, is_good) = match extra {
        Extra::CpuAffinity => ("CPU Affinity", is_list(cell)),
        Extra::NumaAffinity => ("NUMA Affinity", is_list(cell)),
        Extra::GpuNumaId => ("GPU NUMA ID", !matches!(value, Printed::Text(_))),
    };
    if is_good {
        Ok(value)
    } else {
        Err(Fault::UnknownToken {
            row: token(label),
            column: name.to_owned(),
            token: token(cell.unwrap_or_default()),
        })
    }
}

fn is_list(cell: Option<&str>) -> bool {
    cell.is_none_or(|text| text == "N/A" || text.parse::<CpuList>().is_ok())
}

/// The lines `NICn: name` below `NIC Legend:`.
fn legend<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Option<Labelled<String>> {
    let mut lines = lines.map(|(_, line)| line.trim_start_matches(['#', '>', '|', ' ', '\t']).trim_end());
    lines.find(|line| line.starts_with("NIC Legend"))?;
    let entries = lines
        .skip_while(|line| line.is_empty())
        .map_while(|line| line.split_once(':'))
        .filter(|(label, _)| label.starts_with("NIC"))
        .map(|(label, name)| (label.to_owned(), name.trim().to_owned()));
    Some(entries.collect())
}

/// A warning if another table follows.
fn second_table<'a>(mut lines: impl Iterator<Item = (usize, &'a str)>) -> Option<String> {
    lines.find_map(|(line, text)| {
        let words: Vec<&str> = text::cells(text).take(16).collect();
        is_header(&words).then(|| format!("a second table at line {line} is ignored"))
    })
}

fn report(
    table: &Table<'_>,
    columns: Vec<(Extra, Labelled<Printed>)>,
    nic_names: Option<Labelled<String>>,
) -> Report {
    let is_gpu_at = |index: &usize| is_gpu(table.labels[*index]);
    let (gpus, nics): (Vec<usize>, Vec<usize>) = (0..table.labels.len()).partition(is_gpu_at);
    let mut links = Vec::new();
    let mut nic_links = Vec::new();
    for (index, &a) in gpus.iter().enumerate() {
        links.extend(gpus[index + 1..].iter().filter_map(|&b| link(table, a, b)));
    }
    for &a in &gpus {
        links.extend(nics.iter().filter_map(|&b| link(table, a, b)));
    }
    for (index, &a) in nics.iter().enumerate() {
        nic_links.extend(nics[index + 1..].iter().filter_map(|&b| link(table, a, b)));
    }
    let mut report = Report::new(Format::SmiMatrix, gpus.len());
    report.nics = Some(nics.len());
    report.nic_names = nic_names.filter(|names| !names.0.is_empty());
    report.links = Some(links);
    report.nic_links = (!nic_links.is_empty()).then_some(nic_links);
    report.warnings.clone_from(&table.warnings);
    for (extra, values) in columns {
        let slot = match extra {
            Extra::CpuAffinity => &mut report.cpu_affinity,
            Extra::NumaAffinity => &mut report.numa,
            Extra::GpuNumaId => &mut report.gpu_numa_id,
        };
        *slot = Some(values);
    }
    report
}

fn link(table: &Table<'_>, a: usize, b: usize) -> Option<ReportLink> {
    let word = table.pair(a, b)?;
    let (a, b) = (table.labels[a], table.labels[b]);
    Some(match parse_nvlinks(word) {
        Some(count) => ReportLink { count: Some(count), ..ReportLink::new(a, b, "NV") },
        None => ReportLink::new(a, b, word),
    })
}

fn topology(table: &Table<'_>, report: &Report) -> Result<Topology, BuildError> {
    let mut builder = Topology::builder();
    let mut ids = Vec::new();
    let mut nodes: Vec<NodeDesc> = table.labels.iter().map(|label| node(label, report)).collect();
    for nic in (0..nodes.len()).filter(|&index| !is_gpu(table.labels[index])) {
        nodes[nic].place.numa_node = numa_node_of_nic(table, &nodes, nic);
    }
    for node in nodes {
        ids.push(builder.node(node)?);
    }
    let switched: Vec<bool> = (0..ids.len()).map(|gpu| is_switched(table, gpu)).collect();
    for a in 0..ids.len() {
        for b in a + 1..ids.len() {
            let Some(code) = table.pair(a, b).and_then(parse_code) else {
                continue;
            };
            let desc = describe(code, switched[a] || switched[b]);
            builder.link_both(ids[a], ids[b], desc)?;
        }
    }
    builder.attach_to_hosts(&ids, Provenance::File)?;
    Ok(builder.build())
}

fn node(label: &str, report: &Report) -> NodeDesc {
    if !is_gpu(label) {
        let mut nic = NodeDesc::new(label, NodeKind::Nic);
        nic.model = report.nic_names.as_ref().and_then(|names| names.find(label)).cloned();
        return nic;
    }
    let mut gpu = NodeDesc::device(label, DeviceKind::Gpu);
    let value = |column: &Option<Labelled<Printed>>| column.as_ref()?.find(label).cloned();
    gpu.place.numa_node = value(&report.numa).and_then(|numa| numa.numa_node());
    gpu.place.cpus = match value(&report.cpu_affinity) {
        Some(Printed::Number(cpu)) => u32::try_from(cpu).ok().map(|cpu| [cpu].into_iter().collect()),
        Some(Printed::Text(list)) => list.parse().ok(),
        _ => None,
    };
    gpu
}

/// The NUMA node of the GPUs that a card shares one with, if they agree.
///
/// The table has no affinity for cards, but anything nearer than `SYS` is within a NUMA node by definition.
fn numa_node_of_nic(table: &Table<'_>, nodes: &[NodeDesc], nic: usize) -> Option<u32> {
    let shares = |gpu: usize| {
        let code = table.pair(gpu, nic).and_then(parse_code);
        matches!(code, Some(Code::Path(path)) if path <= PathClass::Node)
    };
    let mut near = (0..nodes.len()).filter(|&gpu| is_gpu(table.labels[gpu]) && shares(gpu));
    let numa_node = nodes[near.next()?].place.numa_node;
    near.all(|gpu| nodes[gpu].place.numa_node == numa_node).then_some(numa_node).flatten()
}

fn describe(code: Code, is_switched: bool) -> LinkDesc {
    match code {
        Code::Path(path) => LinkDesc::new(LinkClass::Pcie, Provenance::File).path(path),
        Code::NvLinks(count) => {
            let class = if is_switched { LinkClass::NvSwitch } else { LinkClass::NvLink };
            LinkDesc::new(class, Provenance::File).link_count(count)
        }
    }
}

/// Whether a GPU shows more NVLinks than any GPU has ports, so that they must be the same links through a switch.
///
/// The table itself never says. With few enough links it can be either, and then nothing is claimed.
fn is_switched(table: &Table<'_>, gpu: usize) -> bool {
    let links = (0..table.labels.len())
        .filter_map(|other| table.pair(gpu, other))
        .filter_map(parse_nvlinks)
        .fold(0_u32, u32::saturating_add);
    links > NVLINK_PORTS
}

/// The most NVLink ports a GPU has had (Hopper and Blackwell).
const NVLINK_PORTS: u32 = 18;
