//! `nvidia-smi nvlink -s`: the NVLinks of each GPU and their speed, but not where they lead.

use warpweft_core_types::DeviceUuid;

use super::{Fault, Format, ImportError, Imported, Labelled, NvLinkReport, Report, error::token, text};
use crate::{DeviceKind, NodeDesc, Topology};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let gpus = read(text)?;
    if gpus.is_empty() {
        return Err(ImportError::no_table(text));
    }
    let mut builder = Topology::builder();
    let mut warnings = Vec::new();
    for gpu in &gpus {
        let mut desc = NodeDesc::device(&gpu.label, DeviceKind::Gpu).model(&gpu.report.name);
        match gpu.uuid {
            Some(uuid) if gpus.iter().filter(|other| other.uuid == Some(uuid)).count() > 1 => {
                warnings.push(format!("{} shares its UUID with another GPU", gpu.label));
            }
            Some(uuid) => desc = desc.uuid(uuid),
            None => warnings.push(format!("{} has no readable UUID", gpu.label)),
        }
        builder.node(desc).map_err(|source| ImportError::Build { format: Format::SmiNvLink, source })?;
    }
    let mut report = Report::new(Format::SmiNvLink, gpus.len());
    report.nvlink = Some(gpus.into_iter().map(|gpu| (gpu.label, gpu.report)).collect());
    report.warnings = warnings;
    Ok(Imported { topology: builder.build(), report })
}

/// Whether a line can only be of this format.
pub(super) fn is_link(line: &str) -> bool {
    is_all_inactive(line) || link_line(line).is_some()
}

struct Gpu {
    label: String,
    uuid: Option<DeviceUuid>,
    report: NvLinkReport,
}

fn read(text: &str) -> Result<Vec<Gpu>, ImportError> {
    let mut gpus: Vec<Gpu> = Vec::new();
    for (line, text) in text::numbered(text) {
        let at = |fault: Fault| fault.at(Format::SmiNvLink, line);
        if let Some(gpu) = gpu_line(text) {
            if gpus.len() == super::MAX_ENDPOINTS {
                return Err(ImportError::TooMany {
                    format: Format::SmiNvLink,
                    line,
                    what: "GPUs",
                    limit: super::MAX_ENDPOINTS,
                });
            }
            if gpus.iter().any(|known| known.label == gpu.label) {
                return Err(at(Fault::DoubleLabel { label: gpu.label }));
            }
            gpus.push(gpu);
        } else if let Some((number, state)) = link_line(text) {
            let gpu = gpus.last_mut().ok_or_else(|| at(Fault::missing("the GPU above this link")))?;
            gpu.add_link(number, state).map_err(at)?;
        }
    }
    Ok(gpus)
}

impl Gpu {
    fn add_link(&mut self, number: u32, state: &str) -> Result<(), Fault> {
        if state.eq_ignore_ascii_case("<inactive>") {
            self.report.inactive += 1;
            return Ok(());
        }
        let what = || format!("link {number} of {}", self.label);
        let gb_s = state
            .strip_suffix("GB/s")
            .and_then(|rate| rate.trim().parse::<f64>().ok())
            .filter(|rate| (0.0..=MAX_GB_S).contains(rate))
            .ok_or_else(|| Fault::bad_value(what(), state))?;
        let key = number.to_string();
        if self.report.links.find(&key).is_some() {
            return Err(Fault::DoubleLabel { label: what() });
        }
        self.report.links.0.push((key, gb_s));
        self.report.active += 1;
        // Printed with three decimals at most; the sum of floats would show more.
        let sum = self.report.sum_gb_s + gb_s;
        self.report.sum_gb_s = (sum * 1_000.0).round() / 1_000.0;
        Ok(())
    }
}

/// `GPU 0: name (UUID: GPU-...)`.
fn gpu_line(line: &str) -> Option<Gpu> {
    let (number, rest) = line.trim().strip_prefix("GPU ")?.split_once(':')?;
    let number: u32 = number.parse().ok()?;
    let (name, uuid) = rest.rsplit_once("(UUID:")?;
    Some(Gpu {
        label: format!("GPU{number}"),
        uuid: uuid.trim_end_matches(')').parse().ok(),
        report: NvLinkReport {
            name: token(name.trim()),
            active: 0,
            inactive: 0,
            sum_gb_s: 0.0,
            links: Labelled::default(),
        },
    })
}

/// `Link 0: 25.781 GB/s` or `Link 0: <inactive>`.
fn link_line(line: &str) -> Option<(u32, &str)> {
    let (number, state) = line.trim().strip_prefix("Link ")?.split_once(':')?;
    let number: u32 = number.parse().ok().filter(|number| *number < MAX_LINKS)?;
    Some((number, state.trim()))
}

/// What is printed instead of links where none is active.
fn is_all_inactive(line: &str) -> bool {
    line.trim_start().to_ascii_lowercase().starts_with("nvml: unable to retrieve nvlink information")
}

/// Bounds the list of one GPU; the most there has been is 18.
const MAX_LINKS: u32 = 256;

/// No link is near this; it keeps sums finite.
const MAX_GB_S: f64 = 100_000.0;
