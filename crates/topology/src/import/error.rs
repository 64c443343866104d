//! Why an import was refused, in words that let the reader fix the file.

use std::io;

use warpweft_core_types::{Bytes, ErrorClass};

use super::Format;
use crate::BuildError;

/// Why something could not be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The input is longer than what is read at most.
    #[error("the input is longer than {limit}")]
    TooLong {
        /// The most that is read.
        limit: Bytes,
    },
    /// The input could not be read.
    #[error("the input cannot be read")]
    Io(#[source] io::Error),
    /// The input is not UTF-8.
    #[error("line {line}, byte {column}: the input is not UTF-8 text")]
    NotText {
        /// Line of the first bad byte, from 1.
        line: usize,
        /// Position of the first bad byte in its line, from 1.
        column: usize,
    },
    /// Nothing in the input is a topology.
    #[error("{}", no_table(said))]
    NoTable {
        /// The line that explains why, or else the first one.
        said: String,
    },
    /// The input is of another format than was asked for.
    #[error("{asked} was expected, but this is {found}")]
    OtherFormat {
        /// What was asked for.
        asked: Format,
        /// What the input looks like.
        found: Format,
    },
    /// The input describes more than is accepted.
    #[error("{format}, line {line}: more than {limit} {what}")]
    TooMany {
        /// What the input was read as.
        format: Format,
        /// Where the limit was passed, from 1.
        line: usize,
        /// What there is too much of.
        what: &'static str,
        /// How much is accepted.
        limit: usize,
    },
    /// The input is of a known format and damaged.
    #[error("{format}, line {line}: {fault}")]
    Damaged {
        /// What the input was read as.
        format: Format,
        /// Where, from 1.
        line: usize,
        /// What is wrong.
        fault: Fault,
    },
    /// The parts of the input do not make a topology.
    #[error("{format}: the parts contradict each other")]
    Build {
        /// What the input was read as.
        format: Format,
        /// What does not fit.
        #[source]
        source: BuildError,
    },
}

impl ImportError {
    /// How to react: another file may do, the same one will not, unless reading it was what failed.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Io(_) => ErrorClass::Transient,
            Self::NoTable { .. } | Self::TooLong { .. } | Self::TooMany { .. } => ErrorClass::Unsupported,
            _ => ErrorClass::Usage,
        }
    }

    pub(super) fn no_table(text: &str) -> Self {
        const SIGNS: [&str; 4] = ["failed", "error", "not found", "unable"];
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
        let explains = |line: &&str| {
            let line = line.to_ascii_lowercase();
            SIGNS.iter().any(|sign| line.contains(sign))
        };
        let said = lines().find(explains).or_else(|| lines().next());
        Self::NoTable { said: clip(said.unwrap_or_default(), 200) }
    }
}

/// What is wrong with a damaged input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A cell of a table holds none of the words it may hold.
    #[error("row {row}, column {column}: {token:?} is not known here")]
    UnknownToken {
        /// The row's label.
        row: String,
        /// The column's label.
        column: String,
        /// What stands there.
        token: String,
    },
    /// The header of a table holds a word that is neither a device nor a known column.
    #[error("the header has an unknown column {token:?}")]
    UnknownColumn {
        /// What stands there.
        token: String,
    },
    /// A row is longer or shorter than the header.
    #[error("row {row} has {found} cells where the header has {expected}")]
    CellCount {
        /// The row's label.
        row: String,
        /// Cells the header asks for.
        expected: usize,
        /// Cells that are there.
        found: usize,
    },
    /// Rows of devices are missing.
    #[error("the table is incomplete: {columns} GPU columns but no rows {rows}")]
    MissingRows {
        /// GPU columns in the header.
        columns: usize,
        /// Labels of the missing rows.
        rows: String,
    },
    /// Rows exist that the header does not know.
    #[error("rows {rows} have no column in the header")]
    RowsWithoutColumn {
        /// Labels of those rows.
        rows: String,
    },
    /// The cell of a device with itself is not marked as such, or another one is.
    #[error("row {row} has {token:?} under {column}, where only {row} itself is marked {mark:?}")]
    Diagonal {
        /// The row's label.
        row: String,
        /// The column's label.
        column: String,
        /// What stands there.
        token: String,
        /// The mark of a device with itself.
        mark: &'static str,
    },
    /// A label stands twice.
    #[error("{label} appears twice")]
    DoubleLabel {
        /// The label.
        label: String,
    },
    /// The two cells of a pair contradict each other.
    #[error("{a} to {b} is {there:?} but {b} to {a} is {back:?}")]
    Asymmetric {
        /// One device.
        a: String,
        /// The other device.
        b: String,
        /// What `a` says.
        there: String,
        /// What `b` says.
        back: String,
    },
    /// A list has another length than the file announces.
    #[error("{found} {what} where {expected} were announced")]
    Announced {
        /// What the list holds.
        what: &'static str,
        /// How many were announced.
        expected: usize,
        /// How many are there.
        found: usize,
    },
    /// A value cannot be read.
    #[error("{what} is {text:?}, which cannot be read")]
    BadValue {
        /// Whose value, such as `CPU affinity of GPU0`.
        what: String,
        /// What stands there.
        text: String,
    },
    /// Something that must be there is not.
    #[error("{what} is missing")]
    Missing {
        /// What is missing.
        what: String,
    },
    /// XML that is not well-formed.
    #[error("not well-formed XML: {reason}")]
    Xml {
        /// What the parser says.
        reason: String,
    },
    /// The XML or JSON stops before it is complete.
    #[error("the text ends early: {unclosed} is not closed")]
    EndsEarly {
        /// What was still open.
        unclosed: String,
    },
    /// Elements are nested deeper than is accepted.
    #[error("nested deeper than {limit} levels")]
    TooDeep {
        /// The deepest level that is accepted.
        limit: usize,
    },
    /// The document type declares something; entities are how small files become huge ones.
    #[error("declarations inside the document type are refused")]
    Declarations,
    /// PCI functions carry no class, so nobody can tell GPUs from network cards.
    #[error(
        "{count} <pci> nodes have no class attribute, so no GPU can be recognised; this file needs the machine it was written for"
    )]
    Unclassified {
        /// PCI functions without a class.
        count: usize,
    },
    /// JSON that does not have the shape of a topology.
    #[error("not a topology as `to_json` and `warpweft topo --save` write it: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
}

fn no_table(said: &str) -> String {
    match said {
        "" => "the file is empty".to_owned(),
        said => format!("there is no topology table in this text, which says {said:?}"),
    }
}

impl Fault {
    pub(super) fn at(self, format: Format, line: usize) -> ImportError {
        ImportError::Damaged { format, line, fault: self }
    }

    pub(super) fn bad_value(what: impl Into<String>, text: &str) -> Self {
        Self::BadValue { what: what.into(), text: clip(text, TOKEN_CHARS) }
    }

    pub(super) fn missing(what: impl Into<String>) -> Self {
        Self::Missing { what: what.into() }
    }
}

/// A token for an error message: never long, whatever the input.
pub(super) fn token(text: &str) -> String {
    clip(text, TOKEN_CHARS)
}

fn clip(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

const TOKEN_CHARS: usize = 60;
