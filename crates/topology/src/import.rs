//! Reads what other tools print about a machine.
//!
//! [`import`] finds the format by content; [`import_as`] insists on one.
//! Each importer is strict: a value it cannot read, a row that is missing or two cells that contradict each other are errors that name the place, because a wrong matrix is worse than none.
//! What can be left out without harm becomes a warning in the [`Report`].
//!
//! Input is untrusted: at most [`MAX_IMPORT`] is read, at most [`MAX_ENDPOINTS`] devices are accepted, XML entities are never expanded and nesting is bounded.

mod detect;
mod error;
mod hwloc;
mod json;
mod nccl;
mod report;
mod rocm;
mod smi_matrix;
mod smi_nvlink;
mod smi_p2p;
mod table;
mod text;
mod xml;
mod xpu;

use std::{fmt, io::Read, str};

use serde::Serialize;
use warpweft_core_types::Bytes;

use crate::Topology;

pub use error::{Fault, ImportError};
pub(crate) use report::edge_word;
pub use report::{
    FastLink, Labelled, Numa, NvLinkReport, P2pStatus, Printed, Report, ReportDevice, ReportLink, ReportNic,
    Via,
};

/// The longest input that is read.
pub const MAX_IMPORT: Bytes = Bytes::mib(16);

/// The most devices and network cards that one input may describe; pairs grow with the square.
pub const MAX_ENDPOINTS: usize = 1_024;

/// A format that can be imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Format {
    /// The matrix of `nvidia-smi topo -m`, every layout since the `SOC` legend.
    SmiMatrix,
    /// The peer-to-peer table of `nvidia-smi topo -p2p`.
    SmiP2p,
    /// The link list of `nvidia-smi nvlink -s`.
    SmiNvLink,
    /// The XML of `NCCL_TOPO_FILE` and `NCCL_TOPO_DUMP_FILE`, and RCCL's dialect of it.
    NcclXml,
    /// The XML of hwloc's `lstopo`, formats 1 to 3.
    HwlocXml,
    /// The four tables of `rocm-smi --showtopo`.
    RocmSmi,
    /// The matrix of `xpu-smi topology -m`.
    XpuSmi,
    /// What [`Topology::to_json`] writes.
    Json,
}

impl Format {
    /// Every format, in the order of the documentation.
    pub const ALL: [Self; 8] = [
        Self::SmiMatrix,
        Self::SmiP2p,
        Self::SmiNvLink,
        Self::NcclXml,
        Self::HwlocXml,
        Self::RocmSmi,
        Self::XpuSmi,
        Self::Json,
    ];
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SmiMatrix => "nvidia-smi topo -m",
            Self::SmiP2p => "nvidia-smi topo -p2p",
            Self::SmiNvLink => "nvidia-smi nvlink -s",
            Self::NcclXml => "nccl-topo-xml",
            Self::HwlocXml => "hwloc-xml",
            Self::RocmSmi => "rocm-smi --showtopo",
            Self::XpuSmi => "xpu-smi topology -m",
            Self::Json => "warpweft-topology",
        })
    }
}

impl Serialize for Format {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// An imported machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// The graph, every fact marked [`Provenance::File`](crate::Provenance::File) unless the file says better.
    pub topology: Topology,
    /// What the file says, in the file's own words.
    pub report: Report,
}

/// Imports `bytes` in whatever known format they are.
///
/// # Errors
///
/// [`ImportError`] if no format is recognised or the content cannot be trusted.
pub fn import(bytes: &[u8]) -> Result<Imported, ImportError> {
    let text = checked_text(bytes)?;
    let format = detect::format(&text).ok_or_else(|| ImportError::no_table(&text))?;
    import_text(format, &text)
}

/// Imports `bytes`, which must be of `format`.
///
/// # Errors
///
/// As [`import`], and if the content is of another format.
pub fn import_as(format: Format, bytes: &[u8]) -> Result<Imported, ImportError> {
    let text = checked_text(bytes)?;
    import_text(format, &text).map_err(|error| match detect::format(&text) {
        Some(found) if found != format => ImportError::OtherFormat { asked: format, found },
        _ => error,
    })
}

/// Imports what `reader` yields; reads no more than [`MAX_IMPORT`] and one byte.
///
/// # Errors
///
/// As [`import`], and [`ImportError::Io`] if reading fails.
pub fn import_reader(reader: impl Read) -> Result<Imported, ImportError> {
    let mut bytes = Vec::new();
    reader.take(MAX_IMPORT.0 + 1).read_to_end(&mut bytes).map_err(ImportError::Io)?;
    import(&bytes)
}

fn import_text(format: Format, text: &str) -> Result<Imported, ImportError> {
    match format {
        Format::SmiMatrix => smi_matrix::import(text),
        Format::SmiP2p => smi_p2p::import(text),
        Format::SmiNvLink => smi_nvlink::import(text),
        Format::NcclXml => nccl::import(text),
        Format::HwlocXml => hwloc::import(text),
        Format::RocmSmi => rocm::import(text),
        Format::XpuSmi => xpu::import(text),
        Format::Json => json::import(text),
    }
}

fn checked_text(bytes: &[u8]) -> Result<std::borrow::Cow<'_, str>, ImportError> {
    if Bytes::of_len(bytes.len()) > MAX_IMPORT {
        return Err(ImportError::TooLong { limit: MAX_IMPORT });
    }
    let text = str::from_utf8(bytes).map_err(|error| {
        let valid = &bytes[..error.valid_up_to()];
        let line_start = valid.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        ImportError::NotText {
            line: valid.iter().filter(|&&byte| byte == b'\n').count() + 1,
            column: valid.len() - line_start + 1,
        }
    })?;
    Ok(text::plain(text))
}
