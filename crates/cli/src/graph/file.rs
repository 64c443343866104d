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
    pub(crate) work: WorkSpec,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum WorkSpec {
    /// Writes a byte everywhere.
    Fill {
        dst: Place,
        byte: u8,
    },
    Copy {
        src: Place,
        dst: Place,
    },
    /// A kernel: `dst[i] *= factor`, in words of 32 bits.
    Scale {
        dst: Place,
        factor: u32,
    },
    /// A kernel: `dst[i] += src[i]`.
    Add {
        src: Place,
        dst: Place,
    },
    /// A kernel: `dst[i] = src[i - 1] + src[i] + src[i + 1]`.
    Stencil {
        src: Place,
        dst: Place,
    },
    /// A task of the host: `dst` is the sum of all words of `src`.
    Sum {
        src: Place,
        dst: Place,
    },
    /// A task of the host: the words of `src` in `dst`, last first.
    Reverse {
        src: Place,
        dst: Place,
    },
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
