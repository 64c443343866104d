//! `nvidia-smi topo -p2p`: whether each GPU can reach the memory of every other.

use warpweft_core_types::LinkClass;

use super::{
    Format, ImportError, Imported, P2pStatus, Report,
    error::{Fault, token},
    table::{Dialect, Table, is_gpu},
    text,
};
use crate::{BuildError, DeviceKind, LinkDesc, NodeDesc, NodeId, Provenance, Topology};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let mut lines = text::numbered(text);
    let table = Table::read(&mut lines, &DIALECT)?.ok_or_else(|| ImportError::no_table(text))?;
    if let Some(label) = table.labels.iter().find(|label| !is_gpu(label)) {
        let token = token(label);
        return Err(Fault::UnknownColumn { token }.at(Format::SmiP2p, table.end));
    }
    let mut report = Report::new(Format::SmiP2p, table.labels.len());
    report.capability = Some(capability(text, table.line(0)));
    report.p2p = Some(statuses(&table));
    report.warnings.clone_from(&table.warnings);
    let topology =
        topology(&table, &report).map_err(|source| ImportError::Build { format: Format::SmiP2p, source })?;
    Ok(Imported { topology, report })
}

/// Whether a cell is a status of this table.
pub(super) fn is_status(word: &str) -> bool {
    meaning(word).is_some()
}

const DIALECT: Dialect = Dialect { format: Format::SmiP2p, mark: "X", is_code: is_status };

fn meaning(status: &str) -> Option<&'static str> {
    Some(match status {
        "OK" => "peer access works",
        "CNS" => "the chipset does not support peer access",
        "GNS" => "the GPU does not support peer access",
        "TNS" => "the topology does not support peer access",
        "NS" => "peer access is not supported",
        "DR" => "peer access is disabled by a registry key",
        "U" => "the status of peer access is unknown",
        _ => return None,
    })
}

/// The option of the last `-p2p` command above the table.
fn capability(text: &str, first_row: usize) -> Option<String> {
    let above = text.lines().take(first_row.saturating_sub(1));
    above
        .filter_map(|line| {
            let mut words = line.split_whitespace().skip_while(|word| *word != "-p2p");
            words.nth(1)
        })
        .filter(|option| matches!(*option, "r" | "w" | "rw" | "n" | "a" | "p"))
        .last()
        .map(str::to_owned)
}

fn statuses(table: &Table<'_>) -> Vec<P2pStatus> {
    pairs(table)
        .filter_map(|(a, b)| {
            Some(P2pStatus {
                a: table.labels[a].to_owned(),
                b: table.labels[b].to_owned(),
                status: table.pair(a, b)?.to_owned(),
            })
        })
        .collect()
}

/// Edges where peer access works; where it is known not to, vetoed ones, so that merging cannot bring it back.
///
/// The tables about NVLink and atomics say nothing about reading and writing, and make no edges.
fn topology(table: &Table<'_>, report: &Report) -> Result<Topology, BuildError> {
    let mut builder = Topology::builder();
    let mut ids: Vec<NodeId> = Vec::new();
    for &label in &table.labels {
        ids.push(builder.node(NodeDesc::device(label, DeviceKind::Gpu))?);
    }
    let option = report.capability.as_ref().and_then(Option::as_deref);
    let is_access = matches!(option, Some("r" | "w" | "rw" | "p"));
    let mut vetoes = Vec::new();
    for (a, b) in pairs(table).filter(|_| is_access) {
        let status = table.pair(a, b).unwrap_or_default();
        if status == "U" {
            continue;
        }
        let desc = LinkDesc::new(LinkClass::Unknown, Provenance::File);
        builder.link_both(ids[a], ids[b], desc)?;
        if let Some(reason) = meaning(status).filter(|_| status != "OK") {
            vetoes.extend([(ids[a], ids[b], reason), (ids[b], ids[a], reason)]);
        }
    }
    let mut topology = builder.build();
    for (from, to, reason) in vetoes {
        topology.veto(from, to, reason)?;
    }
    Ok(topology)
}

fn pairs(table: &Table<'_>) -> impl Iterator<Item = (usize, usize)> {
    let count = table.labels.len();
    (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
}
