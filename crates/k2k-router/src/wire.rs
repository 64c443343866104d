//! What a message looks like in a lane: 16-byte lines, each of which carries 12 bytes and a stamp.
//!
//! A message is a run of lines. The first [`HEADER_LINES`] hold its [`Header`], the others its payload. A line is valid
//! when its stamp is the one its reader expects, so that neither a fence nor a flag is needed between lines.
//!
//! The table below is the only description of the header: the Rust type, its packing, and the C header of the same
//! layout, [`c_header`], are made of it.

use crate::WireError;

/// Bytes that a line carries beside its stamp.
pub const LINE_BYTES: usize = 12;

/// Words of 32 bits that a header takes.
pub const HEADER_WORDS: usize = 9;

/// Lines that a header takes.
pub const HEADER_LINES: usize = HEADER_WORDS * 4 / LINE_BYTES;

/// The longest payload that travels in lines.
pub const MAX_PAYLOAD: usize = 16 << 10;

/// Lanes between the same two ends, the most urgent first.
pub const PRIORITIES: usize = 3;

/// Times that a message may be handed on.
pub const MAX_HOPS: u8 = 8;

/// One field of the header: where its bits are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its name, in Rust and in C.
    pub name: &'static str,
    /// Which word of the header holds it.
    pub word: usize,
    /// Its lowest bit.
    pub shift: u32,
    /// How many bits it has.
    pub bits: u32,
}

macro_rules! header {
    ($($(#[$doc:meta])+ $name:ident: $type:ty = $word:literal, $shift:literal, $bits:literal;)+) => {
        /// What a message says of itself. It takes 36 bytes in a lane.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct Header {
            $($(#[$doc])+ pub $name: $type,)+
        }

        /// Where each field of a [`Header`] is.
        pub const FIELDS: &[Field] =
            &[$(Field { name: stringify!($name), word: $word, shift: $shift, bits: $bits },)+];

        impl Header {
            /// As the words of its lines. Fields keep their lowest bits.
            #[inline]
            pub fn to_words(&self) -> [u32; HEADER_WORDS] {
                let mut words = [0; HEADER_WORDS];
                $(words[$word] |= (u32::from(self.$name) & mask($bits)) << $shift;)+
                words
            }

            /// What the words say, unless no sender of ours writes such.
            ///
            /// # Errors
            ///
            /// A [`WireError`] naming the field.
            #[inline]
            pub fn from_words(words: &[u32; HEADER_WORDS]) -> Result<Self, WireError> {
                #[expect(clippy::cast_possible_truncation, reason = "the mask leaves no more bits than the field has")]
                let header = Self { $($name: (words[$word] >> $shift & mask($bits)) as $type,)+ };
                header.check()
            }
        }
    };
}

header! {
    /// The actor it is for.
    destination: u32 = 0, 0, 32;
    /// Bytes of the payload.
    length: u32 = 1, 0, 32;
    /// The actor that sent it; 0 for the host.
    source: u32 = 2, 0, 32;
    /// Its place among the messages of the same source, destination and priority, around zero.
    sequence: u32 = 3, 0, 32;
    /// What the payload is, as its sender and receiver agreed.
    kind: u32 = 4, 0, 32;
    /// The generation of the route that its sender saw, around zero.
    generation: u16 = 5, 0, 16;
    /// 0 is the most urgent.
    priority: u8 = 5, 16, 4;
    /// How often it was handed on.
    hops: u8 = 5, 20, 4;
    /// See [`Header::ANSWER`] and [`Header::TIMED`].
    flags: u8 = 5, 24, 8;
    /// Joins an answer to what was asked; 0 where none is expected.
    correlation: u32 = 6, 0, 32;
    /// Microseconds it may still take; 0 for as long as it likes.
    deadline_us: u32 = 7, 0, 32;
    /// The lowest bits of its sender's clock in nanoseconds, if it is [`Header::TIMED`].
    sent_ns: u32 = 8, 0, 32;
}

impl Header {
    /// A flag: it answers what `correlation` names.
    pub const ANSWER: u8 = 1;
    /// A flag: `sent_ns` says when it was sent.
    pub const TIMED: u8 = 2;

    /// Lines that the whole message takes.
    #[inline]
    pub const fn lines(&self) -> usize {
        HEADER_LINES + (self.length as usize).div_ceil(LINE_BYTES)
    }

    #[inline]
    fn check(self) -> Result<Self, WireError> {
        let wrong = |field, value| Err(WireError { field, value });
        if self.length as usize > MAX_PAYLOAD {
            return wrong("length", self.length);
        }
        if usize::from(self.priority) >= PRIORITIES {
            return wrong("priority", self.priority.into());
        }
        if self.hops > MAX_HOPS {
            return wrong("hops", self.hops.into());
        }
        if self.flags & !(Self::ANSWER | Self::TIMED) != 0 {
            return wrong("flags", self.flags.into());
        }
        Ok(self)
    }
}

const fn mask(bits: u32) -> u32 {
    u32::MAX >> (32 - bits)
}

/// The stamp of the line at `position` of a lane with `1 << shift` lines: how often the lane was filled, from 1 on.
///
/// It may go around zero: what a reader finds in place of the line it expects is the one before it, whose stamp is
/// one less.
#[inline]
pub(crate) const fn stamp(position: u64, shift: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "a stamp goes around zero, see above")]
    let lap = (position >> shift) as u32;
    lap.wrapping_add(1)
}

/// A line as two words of 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Halves {
    pub(crate) low: u64,
    pub(crate) high: u64,
}

impl Halves {
    #[inline]
    pub(crate) const fn of_words(words: [u32; 3], stamp: u32) -> Self {
        Self { low: words[0] as u64 | (words[1] as u64) << 32, high: words[2] as u64 | (stamp as u64) << 32 }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "each word is a half")]
    pub(crate) const fn words(self) -> [u32; 3] {
        [self.low as u32, (self.low >> 32) as u32, self.high as u32]
    }

    /// Up to 12 bytes of a payload, with zeros behind them.
    #[inline]
    pub(crate) fn of_bytes(bytes: &[u8], stamp: u32) -> Self {
        let mut whole = [0; LINE_BYTES];
        whole[..bytes.len()].copy_from_slice(bytes);
        let word = |at: usize| u32::from_le_bytes([whole[at], whole[at + 1], whole[at + 2], whole[at + 3]]);
        Self::of_words([word(0), word(4), word(8)], stamp)
    }

    #[inline]
    pub(crate) fn bytes(self) -> [u8; LINE_BYTES] {
        let mut bytes = [0; LINE_BYTES];
        bytes[..8].copy_from_slice(&self.low.to_le_bytes());
        bytes[8..].copy_from_slice(&self.high.to_le_bytes()[..4]);
        bytes
    }

    #[inline]
    pub(crate) const fn stamp(high: u64) -> u32 {
        (high >> 32) as u32
    }
}

/// The header's layout for C and CUDA C, as `kernels/warpweft_wire.h` holds it.
pub fn c_header() -> String {
    use std::fmt::Write as _;

    let c_type = |bits: u32| match bits {
        0..=8 => "uint8_t",
        9..=16 => "uint16_t",
        _ => "uint32_t",
    };
    let mut text = String::from(C_TOP);
    let constants = [
        ("LINE_BYTES", LINE_BYTES),
        ("HEADER_WORDS", HEADER_WORDS),
        ("HEADER_LINES", HEADER_LINES),
        ("MAX_PAYLOAD", MAX_PAYLOAD),
        ("PRIORITIES", PRIORITIES),
        ("MAX_HOPS", MAX_HOPS.into()),
        ("ANSWER", Header::ANSWER.into()),
        ("TIMED", Header::TIMED.into()),
    ];
    // Writing to a string cannot fail.
    for (name, value) in constants {
        let _ = writeln!(text, "#define WARPWEFT_{name} {value}u");
    }
    text.push_str("\nstruct warpweft_header {\n");
    for field in FIELDS {
        let _ = writeln!(text, "    {} {};", c_type(field.bits), field.name);
    }
    text.push_str("};\n\nWARPWEFT_FN void warpweft_pack(const warpweft_header &h, uint32_t *w) {\n");
    text.push_str("    for (uint32_t i = 0; i < WARPWEFT_HEADER_WORDS; i++) w[i] = 0;\n");
    for Field { name, word, shift, bits } in FIELDS {
        let _ = writeln!(text, "    w[{word}] |= ((uint32_t)h.{name} & 0x{:x}u) << {shift};", mask(*bits));
    }
    text.push_str("}\n\nWARPWEFT_FN warpweft_header warpweft_unpack(const uint32_t *w) {\n");
    text.push_str("    warpweft_header h;\n");
    for Field { name, word, shift, bits } in FIELDS {
        let of = c_type(*bits);
        let _ = writeln!(text, "    h.{name} = ({of})(w[{word}] >> {shift} & 0x{:x}u);", mask(*bits));
    }
    text.push_str(C_BOTTOM);
    text
}

const C_TOP: &str = "\
// What a message looks like in a lane. Made of the table in src/wire.rs; its tests say how to make it again.
#pragma once

";

const C_BOTTOM: &str = "    return h;
}

static_assert(WARPWEFT_HEADER_WORDS * 4 == WARPWEFT_HEADER_LINES * WARPWEFT_LINE_BYTES, \"a header fills its lines\");
";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sizes that both languages rely on.
    const _: () = assert!(HEADER_LINES * LINE_BYTES == HEADER_WORDS * 4 && HEADER_WORDS * 4 <= 48);

    #[test]
    fn fields_do_not_overlap_and_fill_the_header() {
        let mut used = [0_u32; HEADER_WORDS];
        for field in FIELDS {
            let bits = mask(field.bits) << field.shift;
            assert_eq!(used[field.word] & bits, 0, "{} overlaps another field", field.name);
            used[field.word] |= bits;
        }
        assert_eq!(used, [u32::MAX; HEADER_WORDS]);
    }

    #[test]
    fn the_c_header_is_what_the_table_makes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/warpweft_wire.h");
        if std::env::var_os("WARPWEFT_BLESS").is_some() {
            std::fs::write(path, c_header()).unwrap();
        }
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            text,
            c_header(),
            "WARPWEFT_BLESS=1 cargo test -p warpweft-k2k-router c_header writes it anew"
        );
    }

    #[test]
    fn a_header_that_nobody_writes_is_refused_by_field() {
        let check = |header: Header, field: Option<&str>| {
            let read = Header::from_words(&header.to_words());
            assert_eq!(read.err().map(|error| error.field), field, "{header:?}");
        };
        check(Header::default(), None);
        check(Header { length: 16 << 10, ..Header::default() }, None);
        check(Header { length: (16 << 10) + 1, ..Header::default() }, Some("length"));
        check(Header { priority: 2, ..Header::default() }, None);
        check(Header { priority: 3, ..Header::default() }, Some("priority"));
        check(Header { hops: 9, ..Header::default() }, Some("hops"));
        check(Header { flags: 4, ..Header::default() }, Some("flags"));
    }

    #[test]
    fn stamps_differ_from_lap_to_lap_also_around_zero() {
        assert_eq!(stamp(0, 3), 1);
        for lap in [0, 1, u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::from(u32::MAX) + 1] {
            for line in [0, 7] {
                assert_ne!(stamp((lap << 3) + line, 3), stamp(((lap + 1) << 3) + line, 3));
            }
        }
    }

    proptest! {
        #[test]
        fn a_header_reads_as_it_was_written(
            ids: [u32; 4], length in 0..=16_384_u32, generation: u16, priority in 0..3_u8,
            hops in 0..=MAX_HOPS, flags in 0..4_u8, correlation: u32, deadline_us: u32, sent_ns: u32,
        ) {
            let [destination, source, sequence, kind] = ids;
            let header = Header {
                destination, length, source, sequence, kind, generation, priority, hops, flags, correlation,
                deadline_us, sent_ns,
            };
            prop_assert_eq!(Header::from_words(&header.to_words()), Ok(header));
        }

        #[test]
        fn any_words_are_a_header_or_an_error(words: [u32; HEADER_WORDS]) {
            if let Ok(header) = Header::from_words(&words) {
                prop_assert_eq!(header.to_words(), words);
            }
        }

        #[test]
        fn a_line_gives_back_its_bytes(bytes in prop::collection::vec(any::<u8>(), 0..=LINE_BYTES), mark: u32) {
            let line = Halves::of_bytes(&bytes, mark);
            prop_assert_eq!(&line.bytes()[..bytes.len()], &bytes[..]);
            prop_assert_eq!(Halves::stamp(line.high), mark);
            prop_assert_eq!(Halves::of_words(line.words(), mark), line);
        }
    }
}
