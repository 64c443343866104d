//! Images of "machine code": 64-bit ELF files with PTX inside.

use crate::exports::{Code, In};

/// The sizes of a header and of a section's header, and the kind of machine that a CUBIN is for.
const HEADER: usize = 64;
const SECTION: usize = 64;
const MACHINE: u16 = 190;

/// The section that holds the text, and the one that holds the names of sections.
const TEXT_NAME: &[u8] = b".nv.stand-in.ptx\0";
const NAMES_NAME: &[u8] = b".shstrtab\0";

/// An image of a PTX text.
pub(crate) fn of_ptx(text: &str) -> Vec<u8> {
    let names: Vec<u8> = [b"\0", TEXT_NAME, NAMES_NAME].concat();
    let (text_at, names_at) = (HEADER, HEADER + text.len());
    let sections_at = (names_at + names.len()).next_multiple_of(8);
    let mut image = Vec::with_capacity(sections_at + 3 * SECTION);
    image.extend(b"\x7fELF\x02\x01\x01\x33");
    image.extend([0; 8]);
    // An executable, of its machine, version 1; no entry and no program headers.
    [2, MACHINE, 1, 0].iter().for_each(|half| image.extend(half.to_le_bytes()));
    [0, 0, sections_at as u64].iter().for_each(|long| image.extend(long.to_le_bytes()));
    image.extend([0; 4]);
    // Sizes of headers, three sections, the last of which has the names.
    [64_u16, 56, 0, 64, 3, 2].iter().for_each(|half| image.extend(half.to_le_bytes()));
    image.extend(text.as_bytes());
    image.extend(&names);
    image.resize(sections_at, 0);
    section(&mut image, 0, 0, 0, 0);
    section(&mut image, 1, 1, text_at, text.len());
    section(&mut image, 1 + TEXT_NAME.len(), 3, names_at, names.len());
    image
}

/// A section's header: where its name is, its type, its place and its length.
fn section(image: &mut Vec<u8>, name: usize, kind: u32, at: usize, len: usize) {
    image.extend(u32::try_from(name).unwrap_or(0).to_le_bytes());
    image.extend(kind.to_le_bytes());
    let aligned = u64::from(kind != 0);
    for long in [0, 0, at as u64, len as u64, 0, aligned, 0] {
        image.extend(long.to_le_bytes());
    }
    image.resize(image.len().next_multiple_of(8), 0);
}

/// The PTX inside an image, which is as long as its header says; other machine code runs on no host.
pub(crate) fn ptx_of(image: &In<u8>) -> Result<String, Code> {
    let bytes = |at: usize, len: usize| (at..at + len).map(|at| image.at(at)).collect::<Result<Vec<u8>, _>>();
    let number = |at: usize, len: usize| {
        let value = bytes(at, len)?.iter().rev().fold(0_u64, |value, &byte| value << 8 | u64::from(byte));
        usize::try_from(value).map_err(|_| Code::INVALID_IMAGE)
    };
    if bytes(0, 5)? != b"\x7fELF\x02" {
        return Err(Code::INVALID_IMAGE);
    }
    let (sections, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    let names = number(0x3e, 2)?;
    if number(0x12, 2)? != usize::from(MACHINE) || size != SECTION || names >= count {
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    let header = |index: usize| sections + index * SECTION;
    let place =
        |index: usize| Ok::<_, Code>((number(header(index) + 24, 8)?, number(header(index) + 32, 8)?));
    let (names_at, names_len) = place(names)?;
    for index in 0..count {
        let name = number(header(index), 4)?;
        if name + TEXT_NAME.len() <= names_len && bytes(names_at + name, TEXT_NAME.len())? == TEXT_NAME {
            let (at, len) = place(index)?;
            return String::from_utf8(bytes(at, len)?).map_err(|_| Code::INVALID_IMAGE);
        }
    }
    Err(Code::NO_BINARY_FOR_GPU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(unsafe_code, reason = "an image is read by its address")]
    fn read(image: &[u8]) -> Result<String, Code> {
        // SAFETY: `of_ptx` made the image, so it is as long as its header says.
        ptx_of(&unsafe { In::from(image.as_ptr()) })
    }

    #[test]
    fn the_text_comes_back() {
        for text in ["", "x", ".version 8.0\n.target sm_70\n"] {
            let image = of_ptx(text);
            assert_eq!(read(&image), Ok(text.to_owned()));
        }
    }

    #[test]
    fn other_images_are_refused() {
        let mut image = of_ptx("text");
        image[0x12] = 62;
        assert_eq!(read(&image), Err(Code::NO_BINARY_FOR_GPU));
        image[4] = 1;
        assert_eq!(read(&image), Err(Code::INVALID_IMAGE));
    }
}
