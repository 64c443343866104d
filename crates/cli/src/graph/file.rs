//! Graphs as files: what is written in them, before it is known to make sense.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};

/// The format's only version.
pub(crate) const VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct File {
    pub(crate) version: u32,
    /// How many devices the numbers below are of.
    pub(crate) devices: u32,
    pub(crate) buffers: Vec<BufferSpec>,
    pub(crate) nodes: Vec<NodeSpec>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BufferSpec {
    pub(crate) name: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) placement: Placement,
}

/// Where memory is to be, by the numbers of devices.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Placement {
    Device(u32),
    HostVisible(u32),
    Shared(Vec<u32>),
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeSpec {
    #[serde(default)]
    pub(crate) name: Option<String>,
    /// Who carries it out, where that is not the device of the memory that it writes.
    #[serde(default)]
    pub(crate) device: Option<u32>,
    #[serde(default)]
    pub(crate) lane: u32,
    #[serde(rename = "do")]
    pub(crate) work: Work<Place>,
}

/// What a node does, with operands by name in a file and by position once they are known.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Work<P> {
    /// Writes a byte everywhere.
    Fill {
        dst: P,
        byte: u8,
    },
    Copy {
        src: P,
        dst: P,
    },
    /// A kernel: `dst[i] *= factor`, in words of 32 bits.
    Scale {
        dst: P,
        factor: u32,
    },
    /// A kernel: `dst[i] += src[i]`.
    Add {
        src: P,
        dst: P,
    },
    /// A kernel: `dst[i] = src[i - 1] + src[i] + src[i + 1]`.
    Stencil {
        src: P,
        dst: P,
    },
    /// A task of the host: `dst` is the sum of all words of `src`.
    Sum {
        src: P,
        dst: P,
    },
    /// A task of the host: the words of `src` in `dst`, last first.
    Reverse {
        src: P,
        dst: P,
    },
}

impl<P> Work<P> {
    /// The same with other operands, each of which is told with the name of its field.
    pub(crate) fn try_map<Q, E>(&self, to: impl Fn(&'static str, &P) -> Result<Q, E>) -> Result<Work<Q>, E> {
        let (src_to, dst_to) = (|src: &P| to("src", src), |dst: &P| to("dst", dst));
        Ok(match self {
            Self::Fill { dst, byte } => Work::Fill { dst: dst_to(dst)?, byte: *byte },
            Self::Copy { src, dst } => Work::Copy { src: src_to(src)?, dst: dst_to(dst)? },
            Self::Scale { dst, factor } => Work::Scale { dst: dst_to(dst)?, factor: *factor },
            Self::Add { src, dst } => Work::Add { src: src_to(src)?, dst: dst_to(dst)? },
            Self::Stencil { src, dst } => Work::Stencil { src: src_to(src)?, dst: dst_to(dst)? },
            Self::Sum { src, dst } => Work::Sum { src: src_to(src)?, dst: dst_to(dst)? },
            Self::Reverse { src, dst } => Work::Reverse { src: src_to(src)?, dst: dst_to(dst)? },
        })
    }

    /// What is read besides, and what is written.
    pub(crate) const fn operands(&self) -> (Option<&P>, &P) {
        match self {
            Self::Fill { dst, .. } | Self::Scale { dst, .. } => (None, dst),
            Self::Copy { src, dst }
            | Self::Add { src, dst }
            | Self::Stencil { src, dst }
            | Self::Sum { src, dst }
            | Self::Reverse { src, dst } => (Some(src), dst),
        }
    }

    /// What it is called in a file, and whether it is a task of the host.
    pub(crate) const fn kind(&self) -> (&'static str, bool) {
        match self {
            Self::Fill { .. } => ("fill", false),
            Self::Copy { .. } => ("copy", false),
            Self::Scale { .. } => ("scale", false),
            Self::Add { .. } => ("add", false),
            Self::Stencil { .. } => ("stencil", false),
            Self::Sum { .. } => ("sum", true),
            Self::Reverse { .. } => ("reverse", true),
        }
    }

    pub(crate) const fn is_in_words(&self) -> bool {
        !matches!(self, Self::Fill { .. } | Self::Copy { .. })
    }
}

/// A buffer's name alone, or with a range of bytes: `"rows"`, or `{"buffer": "rows", "bytes": [0, 1024]}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) buffer: String,
    pub(crate) bytes: Option<[u64; 2]>,
}

impl<'de> Deserialize<'de> for Place {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Ranged {
            buffer: String,
            #[serde(default)]
            bytes: Option<[u64; 2]>,
        }

        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = Place;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a buffer's name, or {\"buffer\": name, \"bytes\": [start, end]}")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Place, E> {
                Ok(Place { buffer: name.to_owned(), bytes: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Place, A::Error> {
                let Ranged { buffer, bytes } = Ranged::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Place { buffer, bytes })
            }
        }

        deserializer.deserialize_any(Either)
    }
}
