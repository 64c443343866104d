//! Finds the format of an input by what it contains.

use super::{Format, smi_nvlink, smi_p2p, table, text, xml, xpu};

/// The format of the first thing in `text` that belongs to one.
pub(super) fn format(text: &str) -> Option<Format> {
    let start = text.trim_start();
    if start.starts_with('<') {
        return match xml::root_name(start)? {
            "system" => Some(Format::NcclXml),
            "topology" => Some(Format::HwlocXml),
            _ => None,
        };
    }
    if start.starts_with('{') {
        return Some(Format::Json);
    }
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.contains("between two GPUs") {
            return Some(Format::RocmSmi);
        }
        if xpu::is_header(line) {
            return Some(Format::XpuSmi);
        }
        if smi_nvlink::is_link(line) {
            return Some(Format::SmiNvLink);
        }
        let words: Vec<&str> = text::cells(line).take(WORDS).collect();
        if table::is_header(&words) {
            return Some(table_format(lines));
        }
    }
    None
}

/// Tells the two tables of `nvidia-smi topo` apart by the first cell that joins two devices.
fn table_format<'a>(lines: impl Iterator<Item = &'a str>) -> Format {
    let joins = lines
        .take(LINES)
        .flat_map(|line| text::cells(line).take(WORDS))
        .find(|cell| smi_p2p::is_status(cell) || super::smi_matrix::is_code(cell));
    match joins {
        Some(cell) if smi_p2p::is_status(cell) => Format::SmiP2p,
        _ => Format::SmiMatrix,
    }
}

/// Words and lines that are looked at; a table shows what it is long before.
const WORDS: usize = 16;
const LINES: usize = 64;
