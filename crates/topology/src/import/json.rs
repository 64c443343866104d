//! Our own format.

use super::{Fault, Format, ImportError, Imported, Report};
use crate::{JsonError, Topology};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let topology = Topology::from_json(text).map_err(|error| match error {
        JsonError::Syntax { line, ends_early: true, .. } => {
            Fault::EndsEarly { unclosed: "the document".to_owned() }.at(Format::Json, line)
        }
        JsonError::Syntax { line, reason, .. } => Fault::Json { reason }.at(Format::Json, line),
        JsonError::Build(source) => ImportError::Build { format: Format::Json, source },
        other => Fault::Json { reason: other.to_string() }.at(Format::Json, 1),
    })?;
    let report = Report::of(&topology);
    Ok(Imported { topology, report })
}
