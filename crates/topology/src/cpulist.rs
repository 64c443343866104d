//! Sets of processors as text, in the spellings of Linux, NCCL and hwloc.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A set of processor numbers (or of any small numbers, such as NUMA nodes).
///
/// Its text is the kernel's list format: `0-3,8,10-11`; the empty set is the empty text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct CpuList {
    /// First and last of each run, ascending, with a gap between runs.
    runs: Vec<(u32, u32)>,
}

/// The text is not a set of processors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {expected}")]
pub struct ParseCpuListError {
    /// What was offered.
    pub text: String,
    /// What it should have looked like.
    pub expected: &'static str,
}

impl CpuList {
    /// Reads a mask of 32-bit hexadecimal words, highest first, separated by commas: `000000ff,ffff0000`.
    ///
    /// A word may be short, empty (zero) or start with `0x`.
    ///
    /// # Errors
    ///
    /// [`ParseCpuListError`] if a word is not hexadecimal or longer than 32 bits, or there are more than 2,048 words.
    pub fn from_mask(text: &str) -> Result<Self, ParseCpuListError> {
        let wrong =
            || ParseCpuListError { text: text.to_owned(), expected: "mask of 32-bit hexadecimal words" };
        let words: Vec<&str> = text.trim().split(',').collect();
        if words.len() > MASK_WORDS {
            return Err(wrong());
        }
        let mut list = Self::default();
        for (index, word) in words.iter().rev().enumerate() {
            let bits = word_bits(word.trim()).ok_or_else(wrong)?;
            let base = u32::try_from(index * 32).map_err(|_| wrong())?;
            for bit in (0..32).filter(|bit| bits >> bit & 1 == 1) {
                list.push_run(base + bit, base + bit);
            }
        }
        Ok(list)
    }

    /// How many numbers are in the set.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|&(first, last)| u64::from(last - first) + 1).sum()
    }

    /// Whether no number is in the set.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether `number` is in the set.
    pub fn contains(&self, number: u32) -> bool {
        self.runs.iter().any(|&(first, last)| (first..=last).contains(&number))
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.runs.iter().flat_map(|&(first, last)| first..=last)
    }

    /// Appends a run that does not start before the end of the last one.
    fn push_run(&mut self, first: u32, last: u32) {
        match self.runs.last_mut() {
            Some(run) if first <= run.1.saturating_add(1) => run.1 = run.1.max(last),
            _ => self.runs.push((first, last)),
        }
    }
}

fn word_bits(word: &str) -> Option<u32> {
    let digits = word.strip_prefix("0x").unwrap_or(word);
    if digits.is_empty() {
        return Some(0);
    }
    // A sign would be accepted by the conversion.
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, 16).ok()
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(numbers: I) -> Self {
        let mut numbers: Vec<u32> = numbers.into_iter().collect();
        numbers.sort_unstable();
        let mut list = Self::default();
        for number in numbers {
            list.push_run(number, number);
        }
        list
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, &(first, last)) in self.runs.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for CpuList {
    type Err = ParseCpuListError;

    /// Reads the kernel's list format; runs may come in any order and overlap.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseCpuListError { text: text.to_owned(), expected: "list of numbers and ranges" };
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| digits.parse::<u32>().ok()).flatten().ok_or_else(wrong)
        };
        let mut runs = Vec::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let run = (number(first.trim())?, number(last.trim())?);
            if run.0 > run.1 {
                return Err(wrong());
            }
            runs.push(run);
        }
        runs.sort_unstable();
        let mut list = Self::default();
        for (first, last) in runs {
            list.push_run(first, last);
        }
        Ok(list)
    }
}

impl Serialize for CpuList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Bounds the work for a mask: 65,536 processors, eight times what Linux supports.
const MASK_WORDS: usize = 2_048;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_in_the_kernel_format() {
        let check = |text: &str, expected: &str| {
            let list: CpuList = text.parse().unwrap();
            assert_eq!(list.to_string(), expected, "{text}");
        };
        check("", "");
        check("0-31,64-95\n", "0-31,64-95");
        check("1-1", "1");
        check("6,14,7", "6-7,14");
        check("0-5,3-9", "0-9");
        check("4294967295", "4294967295");
    }

    #[test]
    fn masks_are_read_highest_word_first() {
        let check = |text: &str, expected: &str| {
            assert_eq!(CpuList::from_mask(text).unwrap().to_string(), expected);
        };
        check("000000ff,ffff0000,00ffffff", "0-23,48-71");
        check("fff0000,0", "48-59");
        check("0x0000ffff,,,0x1", "0,96-111");
        check("", "");
    }

    #[test]
    fn damaged_text_is_refused() {
        for text in ["x", "3-1", "1-", ",", "0-3,", "-1", "+1", "4294967296"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
        for text in ["g", "123456789", "-1", "+1"] {
            assert!(CpuList::from_mask(text).is_err(), "{text}");
        }
    }

    #[test]
    fn membership_and_count_follow_the_runs() {
        let list: CpuList = "0-3,8".parse().unwrap();
        assert_eq!(list.count(), 5);
        assert!(list.contains(3) && !list.contains(4) && list.contains(8));
        assert_eq!(list.iter().collect::<CpuList>(), list);
    }
}
