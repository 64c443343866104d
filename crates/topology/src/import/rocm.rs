//! `rocm-smi --showtopo`: weight, hops and link type of every pair of GPUs, and the NUMA node of each.

use warpweft_core_types::LinkClass;

use super::{
    Fault, Format, ImportError, Imported, Labelled, Printed, Report, ReportLink,
    table::{Dialect, Table, is_gpu},
    text,
};
use crate::{BuildError, DeviceKind, LinkDesc, NodeDesc, Provenance, Topology};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let types = block(text, "Link Type between two GPUs", is_type)?
        .ok_or_else(|| missing(text, "the table of link types"))?;
    let weights = block(text, "Weight between two GPUs", is_number)?;
    let hops = block(text, "Hops between two GPUs", is_number)?;
    let mut report = Report::new(Format::RocmSmi, types.labels.len());
    report.nics = Some(0);
    for (table, name) in [(&weights, "weights"), (&hops, "hops")] {
        match table {
            None => report.warnings.push(format!("the table of {name} is missing")),
            Some(table) if table.labels != types.labels => {
                let what = format!("the header of the table of {name}");
                let fault = Fault::bad_value(what, &table.labels.join(" "));
                return Err(fault.at(Format::RocmSmi, table.end));
            }
            Some(table) => report.warnings.extend(table.warnings.iter().cloned()),
        }
    }
    report.warnings.extend(types.warnings.iter().cloned());
    report.links = Some(links(&types, weights.as_ref(), hops.as_ref()));
    report.numa = numa(text, "Numa Node:", &types)?;
    report.numa_affinity = numa(text, "Numa Affinity:", &types)?;
    let topology =
        topology(&report, &types).map_err(|source| ImportError::Build { format: Format::RocmSmi, source })?;
    Ok(Imported { topology, report })
}

fn block<'a>(
    text: &'a str,
    title: &str,
    is_code: fn(&str) -> bool,
) -> Result<Option<Table<'a>>, ImportError> {
    let dialect = Dialect { format: Format::RocmSmi, mark: "0", is_code };
    let mut lines = text::numbered(text);
    if !lines.any(|(_, line)| line.contains(title)) {
        return Ok(None);
    }
    let table = Table::read(&mut lines, &dialect)?.ok_or_else(|| missing(text, title))?;
    match table.labels.iter().find(|label| !is_gpu(label)) {
        Some(label) => Err(Fault::bad_value("a column", label).at(Format::RocmSmi, table.end)),
        None => Ok(Some(table)),
    }
}

fn missing(text: &str, what: &str) -> ImportError {
    Fault::missing(what).at(Format::RocmSmi, text.lines().count().max(1))
}

fn is_type(word: &str) -> bool {
    matches!(word, "XGMI" | "PCIE")
}

fn is_number(word: &str) -> bool {
    word.parse::<u32>().is_ok_and(|number| number > 0)
}

fn links(types: &Table<'_>, weights: Option<&Table<'_>>, hops: Option<&Table<'_>>) -> Vec<ReportLink> {
    let number = |table: Option<&Table<'_>>, a, b| table?.pair(a, b)?.parse().ok();
    let mut links = Vec::new();
    for a in 0..types.labels.len() {
        for b in a + 1..types.labels.len() {
            let Some(kind) = types.pair(a, b) else {
                continue;
            };
            links.push(ReportLink {
                weight: number(weights, a, b),
                hops: number(hops, a, b),
                ..ReportLink::new(types.labels[a], types.labels[b], kind)
            });
        }
    }
    links
}

/// The lines `GPU[0] : (Topology) Numa Node: 0`.
fn numa(text: &str, key: &str, table: &Table<'_>) -> Result<Option<Labelled<Printed>>, ImportError> {
    let mut values: Vec<(String, Printed)> = Vec::new();
    for (line, text) in text::numbered(text) {
        let Some((head, value)) = text.split_once(key) else {
            continue;
        };
        let at = |fault: Fault| fault.at(Format::RocmSmi, line);
        let number = head.trim_start().strip_prefix("GPU[").and_then(|rest| rest.split(']').next());
        let label = format!("GPU{}", number.unwrap_or_default());
        if !table.labels.contains(&label.as_str()) {
            return Err(at(Fault::bad_value("the GPU of a NUMA node", head.trim())));
        }
        if values.iter().any(|(known, _)| *known == label) {
            return Err(at(Fault::DoubleLabel { label: format!("{key} {label}") }));
        }
        let value = Printed::cell(Some(value.trim()));
        if let Printed::Text(text) = &value {
            return Err(at(Fault::bad_value(format!("{key} of {label}"), text)));
        }
        values.push((label, value));
    }
    Ok((!values.is_empty()).then_some(Labelled(values)))
}

fn topology(report: &Report, types: &Table<'_>) -> Result<Topology, BuildError> {
    let mut builder = Topology::builder();
    let mut ids = Vec::new();
    for &label in &types.labels {
        let mut gpu = NodeDesc::device(label, DeviceKind::Gpu);
        let value = report.numa.as_ref().and_then(|numa| numa.find(label));
        gpu.place.numa_node = value.and_then(Printed::numa_node);
        ids.push(builder.node(gpu)?);
    }
    for a in 0..ids.len() {
        for b in a + 1..ids.len() {
            let class = match types.pair(a, b) {
                Some("XGMI") => LinkClass::Xgmi,
                _ => LinkClass::Pcie,
            };
            let desc = LinkDesc::new(class, Provenance::File);
            builder.link_both(ids[a], ids[b], desc)?;
        }
    }
    builder.attach_to_hosts(&ids, Provenance::File)?;
    Ok(builder.build())
}
