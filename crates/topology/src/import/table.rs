//! The square tables that `nvidia-smi` and `rocm-smi` print: a header of labels, one row per label.
//!
//! Copies of these tables arrive with blanks for tabs, indented, commented out, as Markdown, coloured and wrapped at the width of a terminal.
//! Cells are therefore what stands between runs of blanks, never what stands in a column of characters.

use std::{collections::HashMap, iter};

use super::{
    Format, ImportError, MAX_ENDPOINTS,
    error::{Fault, token},
    text,
};

/// What one kind of square table may contain.
pub(super) struct Dialect {
    pub(super) format: Format,
    /// The mark of a device with itself.
    pub(super) mark: &'static str,
    /// Whether a word can stand in a cell of two different devices.
    pub(super) is_code: fn(&str) -> bool,
}

impl Dialect {
    /// Whether all of these can stand in a row of this table, and there are any.
    fn are_cells(&self, words: &[&str]) -> bool {
        let is_cell = |word: &&str| *word == self.mark || (self.is_code)(word) || is_affinity(word);
        !words.is_empty() && words.iter().all(is_cell)
    }
}

/// A column that is not a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extra {
    CpuAffinity,
    NumaAffinity,
    GpuNumaId,
}

/// A row as printed.
#[derive(Debug)]
pub(super) struct Row<'a> {
    pub(super) line: usize,
    /// One per device column.
    pub(super) cells: Vec<&'a str>,
    /// What follows, for the other columns; may be shorter than those.
    pub(super) rest: Vec<&'a str>,
}

/// A table whose rows fit its header.
#[derive(Debug)]
pub(super) struct Table<'a> {
    pub(super) labels: Vec<&'a str>,
    pub(super) extras: Vec<Extra>,
    /// By position of the label; a network card's row may be missing.
    pub(super) rows: Vec<Option<Row<'a>>>,
    /// The line after the last row.
    pub(super) end: usize,
    pub(super) warnings: Vec<String>,
}

impl<'a> Table<'a> {
    /// Reads the first table of `lines`; `None` if there is no header.
    ///
    /// # Errors
    ///
    /// If header and rows do not fit together, or a cell of a pair contradicts its counterpart.
    pub(super) fn read(
        lines: &mut (impl Iterator<Item = (usize, &'a str)> + Clone),
        dialect: &Dialect,
    ) -> Result<Option<Self>, ImportError> {
        let Some((header_line, words)) = find_header(lines) else {
            return Ok(None);
        };
        let mut header = words;
        let mut warnings = Vec::new();
        while let Some((line, more)) = header_continuation(lines, &header, dialect) {
            warnings.push(format!("line {line} continues the header"));
            header.extend(more);
            lines.next();
        }
        let (labels, extras) =
            split_header(&header).map_err(|fault| fault.at(dialect.format, header_line))?;
        check_labels(&labels, dialect.format, header_line)?;
        let mut table = Self {
            rows: labels.iter().map(|_| None).collect(),
            labels,
            extras,
            end: header_line + 1,
            warnings,
        };
        table.read_rows(lines, dialect)?;
        table.check_rows(dialect)?;
        table.check_pairs(dialect)?;
        Ok(Some(table))
    }

    /// The word for a pair, from the row of either.
    pub(super) fn pair(&self, a: usize, b: usize) -> Option<&'a str> {
        let cell = |row: usize, column: usize| Some(self.rows[row].as_ref()?.cells[column]);
        cell(a, b).or_else(|| cell(b, a))
    }

    /// The line of a pair's word, for messages.
    pub(super) fn line(&self, a: usize) -> usize {
        self.rows[a].as_ref().map_or(self.end, |row| row.line)
    }

    fn read_rows(
        &mut self,
        lines: &mut (impl Iterator<Item = (usize, &'a str)> + Clone),
        dialect: &Dialect,
    ) -> Result<(), ImportError> {
        let places: HashMap<&str, usize> = iter::zip(self.labels.iter().copied(), 0..).collect();
        let mut strangers: Vec<(usize, &str)> = Vec::new();
        let mut read = 0;
        while read < places.len() && strangers.len() < MAX_ENDPOINTS {
            let Some((line, words)) = self.next_words(lines, read > 0) else {
                break;
            };
            match words.first().map(|label| (*label, places.get(label))) {
                Some((_, Some(&place))) => {
                    self.read_row(place, line, words, lines, dialect)?;
                    read += 1;
                }
                Some((label, None)) if is_gpu(label) && words.len() > 1 => {
                    strangers.push((line, label));
                }
                Some((label, None)) if is_label(label) && dialect.are_cells(&words[1..]) => {
                    let warning = format!("row {} has no column in the header", token(label));
                    self.warnings.push(warning);
                }
                _ => {}
            }
        }
        let Some(&(line, _)) = strangers.first() else {
            return Ok(());
        };
        let rows = list(strangers.iter().map(|&(_, label)| label));
        Err(Fault::RowsWithoutColumn { rows }.at(dialect.format, line))
    }

    /// The words of the next line, as many as a row may have and one more; `None` where the table ends.
    fn next_words(
        &self,
        lines: &mut (impl Iterator<Item = (usize, &'a str)> + Clone),
        has_rows: bool,
    ) -> Option<(usize, Vec<&'a str>)> {
        let (line, text) = lines.clone().next()?;
        let words: Vec<&str> = text::cells(text).take(self.width() + 1).collect();
        let is_end = words.first() == Some(&"Legend:") || (has_rows && is_header(&words));
        if is_end {
            return None;
        }
        lines.next();
        Some((line, words))
    }

    /// Keeps a row, together with the lines it was wrapped into.
    fn read_row(
        &mut self,
        place: usize,
        line: usize,
        mut words: Vec<&'a str>,
        lines: &mut (impl Iterator<Item = (usize, &'a str)> + Clone),
        dialect: &Dialect,
    ) -> Result<(), ImportError> {
        let label = self.labels[place];
        self.end = line + 1;
        while let Some((next, more)) = row_continuation(lines, &words, self.width(), dialect) {
            let warning = format!("line {next} continues row {label}");
            self.warnings.push(warning);
            words.extend(more);
            self.end = next + 1;
            lines.next();
        }
        let row = self.row(line, &words).map_err(|fault| fault.at(dialect.format, line))?;
        if self.rows[place].replace(row).is_some() {
            let label = token(label);
            return Err(Fault::DoubleLabel { label }.at(dialect.format, line));
        }
        Ok(())
    }

    /// Words of a full row: label, cells and other columns.
    fn width(&self) -> usize {
        1 + self.labels.len() + self.extras.len()
    }

    fn row(&self, line: usize, words: &[&'a str]) -> Result<Row<'a>, Fault> {
        let found = words.len() - 1;
        let (least, most) = (self.labels.len(), self.labels.len() + self.extras.len());
        if !(least..=most).contains(&found) {
            return Err(Fault::CellCount {
                row: token(words[0]),
                expected: if found < least { least } else { most },
                found,
            });
        }
        let (cells, rest) = words[1..].split_at(least);
        Ok(Row { line, cells: cells.to_vec(), rest: rest.to_vec() })
    }

    fn check_rows(&mut self, dialect: &Dialect) -> Result<(), ImportError> {
        let missing = || {
            let labels = self.labels.iter().copied();
            labels.zip(&self.rows).filter(|(_, row)| row.is_none()).map(|(label, _)| label)
        };
        if missing().any(is_gpu) {
            let columns = self.labels.iter().filter(|label| is_gpu(label)).count();
            let rows = list(missing().filter(|label| is_gpu(label)));
            return Err(Fault::MissingRows { columns, rows }.at(dialect.format, self.end));
        }
        let warnings: Vec<String> = missing().map(|label| format!("row {label} is missing")).collect();
        self.warnings.extend(warnings);
        Ok(())
    }

    fn check_pairs(&self, dialect: &Dialect) -> Result<(), ImportError> {
        for (index, row) in self.rows.iter().enumerate() {
            let Some(row) = row else { continue };
            for (column, &cell) in row.cells.iter().enumerate() {
                self.check_cell(index, column, cell, dialect)
                    .map_err(|fault| fault.at(dialect.format, row.line))?;
            }
        }
        Ok(())
    }

    fn check_cell(&self, row: usize, column: usize, cell: &str, dialect: &Dialect) -> Result<(), Fault> {
        let label = |index: usize| token(self.labels[index]);
        if (row == column) != (cell == dialect.mark) {
            return Err(Fault::Diagonal {
                row: label(row),
                column: label(column),
                token: token(cell),
                mark: dialect.mark,
            });
        }
        if row == column {
            return Ok(());
        }
        if !(dialect.is_code)(cell) {
            return Err(Fault::UnknownToken { row: label(row), column: label(column), token: token(cell) });
        }
        let back = self.rows[column].as_ref().map(|back| back.cells[row]);
        match back {
            // The row above has been checked, so the message blames the later one.
            Some(back) if column < row && back != cell => Err(Fault::Asymmetric {
                a: label(column),
                b: label(row),
                there: token(back),
                back: token(cell),
            }),
            _ => Ok(()),
        }
    }
}

/// Whether the line starts a table.
///
/// Two GPU labels in a row are taken for a header whatever follows, so that a damaged one is reported and not overlooked.
pub(super) fn is_header(words: &[&str]) -> bool {
    match words {
        [first, second, ..] if is_gpu(first) && is_gpu(second) => true,
        [first, rest @ ..] => is_gpu(first) && rest.iter().all(|word| is_header_word(word)),
        [] => false,
    }
}

/// Whether a label is a GPU's.
pub(super) fn is_gpu(label: &str) -> bool {
    label
        .strip_prefix("GPU")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Labels for a message: all of them if few, else the ends.
pub(super) fn list<'a>(labels: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 12;
    let labels: Vec<String> = labels.map(token).collect();
    match labels.as_slice() {
        [first, .., last] if labels.len() > SHOWN => {
            format!("{first}..{last} ({} of them)", labels.len())
        }
        _ => labels.join(", "),
    }
}

fn find_header<'a>(lines: &mut impl Iterator<Item = (usize, &'a str)>) -> Option<(usize, Vec<&'a str>)> {
    lines.find_map(|(line, text)| {
        let words: Vec<&str> = text::cells(text).take(HEADER_WORDS).collect();
        is_header(&words).then_some((line, words))
    })
}

/// The next line's words if they belong to a header that was wrapped.
fn header_continuation<'a>(
    lines: &(impl Iterator<Item = (usize, &'a str)> + Clone),
    header: &[&str],
    dialect: &Dialect,
) -> Option<(usize, Vec<&'a str>)> {
    let (line, text) = lines.clone().next()?;
    let words: Vec<&str> = text::cells(text).take(HEADER_WORDS).collect();
    let continues = !words.is_empty()
        && header.len() + words.len() <= HEADER_WORDS
        && words.iter().all(|word| is_header_word(word) && !(dialect.is_code)(word) && *word != dialect.mark)
        && !header.contains(&words[0]);
    continues.then_some((line, words))
}

/// The next line's words if they belong to a row that was wrapped.
fn row_continuation<'a>(
    lines: &(impl Iterator<Item = (usize, &'a str)> + Clone),
    row: &[&str],
    width: usize,
    dialect: &Dialect,
) -> Option<(usize, Vec<&'a str>)> {
    let (line, text) = lines.clone().next()?;
    let words: Vec<&str> = text::cells(text).take(width + 1).collect();
    let continues = row.len() + words.len() <= width && dialect.are_cells(&words);
    continues.then_some((line, words))
}

/// Device labels, then the other columns.
fn split_header<'a>(words: &[&'a str]) -> Result<(Vec<&'a str>, Vec<Extra>), Fault> {
    let devices = words.iter().position(|word| !is_label(word)).unwrap_or(words.len());
    let (labels, mut rest) = words.split_at(devices);
    let mut extras = Vec::new();
    while !rest.is_empty() {
        let (extra, used) = match rest {
            ["CPU", "Affinity", ..] => (Extra::CpuAffinity, 2),
            ["NUMA", "Affinity", ..] => (Extra::NumaAffinity, 2),
            ["GPU", "NUMA", "ID", ..] => (Extra::GpuNumaId, 3),
            _ => {
                let token = token(rest[0]);
                return Err(Fault::UnknownColumn { token });
            }
        };
        extras.push(extra);
        rest = &rest[used..];
    }
    Ok((labels.to_vec(), extras))
}

fn check_labels(labels: &[&str], format: Format, line: usize) -> Result<(), ImportError> {
    if labels.len() > MAX_ENDPOINTS {
        return Err(ImportError::TooMany { format, line, what: "columns", limit: MAX_ENDPOINTS });
    }
    let mut sorted = labels.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            let label = token(pair[0]);
            Err(Fault::DoubleLabel { label }.at(format, line))
        }
        None => Ok(()),
    }
}

fn is_header_word(word: &str) -> bool {
    is_label(word) || matches!(word, "CPU" | "NUMA" | "Affinity" | "GPU" | "ID")
}

/// GPUs, `NICn`, and network devices by name (`mlx5_bond_0`, `hfi1_1`, `bnxt_re0`): a letter first, a digit last.
fn is_label(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.ends_with(|c: char| c.is_ascii_digit())
        && word.chars().all(plain)
}

/// Lists of numbers, and `N/A`.
fn is_affinity(word: &str) -> bool {
    word == "N/A" || word.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'-' | b','))
}

/// Words of a header that are looked at: one more than can be accepted.
const HEADER_WORDS: usize = MAX_ENDPOINTS + 8;
