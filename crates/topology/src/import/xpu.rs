//! `xpu-smi topology -m`: how the tiles of Intel GPUs are joined.
//!
//! Labels hold a blank (`GPU 0/1` is tile 1 of device 0), so cells are what stands between bars.

use std::collections::BTreeSet;

use warpweft_core_types::{LinkClass, PathClass};

use super::{
    Fault, Format, ImportError, Imported, Labelled, MAX_ENDPOINTS, Printed, Report, ReportLink, error::token,
    text,
};
use crate::{BuildError, CpuList, DeviceKind, LinkDesc, NodeDesc, Provenance, Topology};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let mut lines = text::numbered(text).skip_while(|(_, line)| !is_header(line));
    let Some((header, labels)) = lines.next().map(|(line, text)| (line, cells(text))) else {
        return Err(ImportError::no_table(text));
    };
    let has_cpus = labels.last() == Some(&CPU_AFFINITY);
    let tiles = labels.len() - usize::from(has_cpus);
    let labels = &labels[..tiles];
    check_labels(labels, header)?;
    let rows = rows(lines, labels, has_cpus, header)?;
    check_pairs(labels, &rows)?;
    let mut report = Report::new(Format::XpuSmi, devices(labels).len());
    report.tiles = Some(tiles);
    report.nics = Some(0);
    report.links = Some(pairs(tiles).map(|(a, b)| link(labels, &rows, a, b)).collect());
    if has_cpus {
        report.cpu_affinity = Some(cpu_affinity(labels, &rows)?);
    }
    let topology =
        topology(labels, &rows).map_err(|source| ImportError::Build { format: Format::XpuSmi, source })?;
    Ok(Imported { topology, report })
}

/// Whether the line is the header: `GPU 0/0|GPU 0/1|...`.
pub(super) fn is_header(line: &str) -> bool {
    line.trim_start().starts_with("GPU ") && {
        let cells = cells(line);
        let labels = cells.iter().filter(|cell| device(cell).is_some()).count();
        labels > 0 && labels + usize::from(cells.last() == Some(&CPU_AFFINITY)) == cells.len()
    }
}

const CPU_AFFINITY: &str = "CPU Affinity";

struct Row<'a> {
    line: usize,
    cells: Vec<&'a str>,
}

fn cells(line: &str) -> Vec<&str> {
    line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).take(MAX_ENDPOINTS + 2).collect()
}

/// The device of a label: `GPU 1/0` is a tile of device 1, `GPU 1` the device itself.
fn device(label: &str) -> Option<u32> {
    let number = label.strip_prefix("GPU ")?;
    let (device, tile) = number.split_once('/').unwrap_or((number, "0"));
    tile.parse::<u32>().ok()?;
    device.parse().ok()
}

fn devices(labels: &[&str]) -> BTreeSet<u32> {
    labels.iter().filter_map(|label| device(label)).collect()
}

fn check_labels(labels: &[&str], line: usize) -> Result<(), ImportError> {
    if labels.len() > MAX_ENDPOINTS {
        return Err(ImportError::TooMany {
            format: Format::XpuSmi,
            line,
            what: "columns",
            limit: MAX_ENDPOINTS,
        });
    }
    let mut seen = BTreeSet::new();
    match labels.iter().find(|label| !seen.insert(**label)) {
        Some(label) => {
            let label = token(label);
            Err(Fault::DoubleLabel { label }.at(Format::XpuSmi, line))
        }
        None => Ok(()),
    }
}

fn rows<'a>(
    lines: impl Iterator<Item = (usize, &'a str)>,
    labels: &[&str],
    has_cpus: bool,
    header: usize,
) -> Result<Vec<Row<'a>>, ImportError> {
    let mut rows: Vec<Row<'a>> = Vec::new();
    let expected = labels.len() + usize::from(has_cpus);
    for (line, text) in lines {
        if rows.len() == labels.len() {
            break;
        }
        let cells = cells(text);
        let Some((label, cells)) = cells.split_first() else {
            continue;
        };
        let at = |fault: Fault| fault.at(Format::XpuSmi, line);
        if *label != labels[rows.len()] {
            let what = format!("the label where row {} belongs", labels[rows.len()]);
            return Err(at(Fault::bad_value(what, label)));
        }
        if cells.len() != expected {
            return Err(at(Fault::CellCount { row: token(label), expected, found: cells.len() }));
        }
        rows.push(Row { line, cells: cells.to_vec() });
    }
    if rows.len() < labels.len() {
        let fault = Fault::MissingRows {
            columns: labels.len(),
            rows: super::table::list(labels[rows.len()..].iter().copied()),
        };
        let line = rows.last().map_or(header, |row| row.line) + 1;
        return Err(fault.at(Format::XpuSmi, line));
    }
    Ok(rows)
}

/// A cell that joins two tiles.
#[derive(Clone, Copy)]
enum Code {
    SameCard,
    XeLinks(u32),
    /// By Xe Link through another tile; how many lanes is not said.
    XeLinkDetour,
    Path(PathClass),
}

fn parse_code(word: &str) -> Option<Code> {
    Some(match word {
        "MDF" => Code::SameCard,
        "XL*" => Code::XeLinkDetour,
        "PIX" => Code::Path(PathClass::Pix),
        "PXB" => Code::Path(PathClass::Pxb),
        "PHB" => Code::Path(PathClass::Phb),
        "NODE" => Code::Path(PathClass::Node),
        "SYS" => Code::Path(PathClass::Sys),
        _ => Code::XeLinks(word.strip_prefix("XL")?.parse().ok().filter(|lanes| *lanes > 0)?),
    })
}

fn check_pairs(labels: &[&str], rows: &[Row<'_>]) -> Result<(), ImportError> {
    for (a, row) in rows.iter().enumerate() {
        for (b, label) in labels.iter().enumerate() {
            let cell = row.cells[b];
            check_cell(a == b, cell, labels[a], label).map_err(|fault| fault.at(Format::XpuSmi, row.line))?;
            let there = rows[b].cells[a];
            if b < a && cell != there {
                return Err(Fault::Asymmetric {
                    a: (*label).to_owned(),
                    b: labels[a].to_owned(),
                    there: token(there),
                    back: token(cell),
                }
                .at(Format::XpuSmi, row.line));
            }
        }
    }
    Ok(())
}

fn check_cell(is_self: bool, cell: &str, row: &str, column: &str) -> Result<(), Fault> {
    if is_self != (cell == "S") {
        return Err(Fault::Diagonal {
            row: token(row),
            column: token(column),
            token: token(cell),
            mark: "S",
        });
    }
    if is_self || parse_code(cell).is_some() {
        return Ok(());
    }
    Err(Fault::UnknownToken { row: token(row), column: token(column), token: token(cell) })
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
}

fn link(labels: &[&str], rows: &[Row<'_>], a: usize, b: usize) -> ReportLink {
    let word = rows[a].cells[b];
    match parse_code(word) {
        Some(Code::XeLinks(lanes)) => {
            ReportLink { count: Some(lanes), ..ReportLink::new(labels[a], labels[b], "XL") }
        }
        _ => ReportLink::new(labels[a], labels[b], word),
    }
}

/// One value per device; its tiles must agree.
fn cpu_affinity(labels: &[&str], rows: &[Row<'_>]) -> Result<Labelled<Printed>, ImportError> {
    let mut values: Vec<(String, Printed)> = Vec::new();
    for (label, row) in labels.iter().zip(rows) {
        let text = row.cells.last().copied();
        let name = format!("GPU{}", device(label).unwrap_or_default());
        let value = Printed::cell(text);
        let is_list = text.is_some_and(|text| text == "N/A" || text.parse::<CpuList>().is_ok());
        let agrees = values.iter().all(|(known, other)| *known != name || *other == value);
        if !is_list || !agrees {
            let what = format!("{CPU_AFFINITY} of {label}");
            let fault = Fault::bad_value(what, text.unwrap_or_default());
            return Err(fault.at(Format::XpuSmi, row.line));
        }
        if values.iter().all(|(known, _)| *known != name) {
            values.push((name, value));
        }
    }
    Ok(Labelled(values))
}

fn topology(labels: &[&str], rows: &[Row<'_>]) -> Result<Topology, BuildError> {
    let mut builder = Topology::builder();
    let mut ids = Vec::new();
    for label in labels {
        ids.push(builder.node(NodeDesc::device(*label, DeviceKind::Gpu))?);
    }
    for (a, b) in pairs(labels.len()) {
        let file = |class| LinkDesc::new(class, Provenance::File);
        let desc = match parse_code(rows[a].cells[b]) {
            Some(Code::SameCard) => file(LinkClass::SameDevice),
            Some(Code::XeLinks(lanes)) => file(LinkClass::XeLink).link_count(lanes),
            Some(Code::Path(path)) => file(LinkClass::Pcie).path(path),
            // A detour is the two direct edges it is made of, which are in the graph already.
            Some(Code::XeLinkDetour) | None => continue,
        };
        builder.link_both(ids[a], ids[b], desc)?;
    }
    Ok(builder.build())
}
