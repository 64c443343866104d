//! Who is who: devices, PCI functions and submissions.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A device's globally unique id, the same in every API that reports one.
///
/// CUDA, NVML and Vulkan agree on it for one piece of silicon, so it is what devices are joined by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid([u8; 16]);

impl DeviceUuid {
    /// Wraps the 16 bytes a driver reported.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 16 bytes, in the order a driver reports them.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceUuid({self})")
    }
}

/// The text is not an id of the expected form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {expected}")]
pub struct ParseIdError {
    /// What was offered.
    pub text: String,
    /// What it should have looked like.
    pub expected: &'static str,
}

impl FromStr for DeviceUuid {
    type Err = ParseIdError;

    /// Reads 32 hexadecimal digits, hyphens and a leading `GPU-` allowed.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseIdError { text: text.to_owned(), expected: "UUID of 32 hexadecimal digits" };
        let digits: String = text.trim().trim_start_matches("GPU-").chars().filter(|&c| c != '-').collect();
        if digits.len() != 32 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let value = u128::from_str_radix(&digits, 16).map_err(|_| wrong())?;
        Ok(Self(value.to_be_bytes()))
    }
}

/// A PCI function: `domain:bus:device.function`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain (segment); 16 bits on most machines, 32 in NVML's text.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, below 32.
    pub device: u8,
    /// Function number, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PciAddress({self})")
    }
}

impl FromStr for PciAddress {
    type Err = ParseIdError;

    /// Reads `[domain:]bus:device.function`, all hexadecimal; a missing domain is 0.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseIdError { text: text.to_owned(), expected: "PCI address like 0000:1b:00.0" };
        let hex = |digits: &str, below: u32| {
            let value = hexadecimal(digits).ok_or_else(wrong)?;
            if value < below { Ok(value) } else { Err(wrong()) }
        };
        let narrow = |value: u32| u8::try_from(value).map_err(|_| wrong());
        let (place, function) = text.trim().rsplit_once('.').ok_or_else(wrong)?;
        let mut parts = place.rsplit(':');
        let device = parts.next().ok_or_else(wrong)?;
        let bus = parts.next().ok_or_else(wrong)?;
        let domain = parts.next();
        if parts.next().is_some() {
            return Err(wrong());
        }
        Ok(Self {
            domain: domain.map(|digits| hexadecimal(digits).ok_or_else(wrong)).transpose()?.unwrap_or(0),
            bus: narrow(hex(bus, 256)?)?,
            device: narrow(hex(device, 32)?)?,
            function: narrow(hex(function, 8)?)?,
        })
    }
}

/// Digits alone: `from_str_radix` would take a sign too.
fn hexadecimal(digits: &str) -> Option<u32> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if plain { u32::from_str_radix(digits, 16).ok() } else { None }
}

/// Serializes a type by its `Display` and `FromStr`.
macro_rules! serde_as_text {
    ($name:ty) => {
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

serde_as_text!(DeviceUuid);
serde_as_text!(PciAddress);

/// Names one device of one backend for as long as the process lives.
///
/// Two backends can reach the same silicon: their ids differ, their `uuid` does not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct DeviceId {
    /// The backend's name, such as `host` or `cuda`.
    pub backend: &'static str,
    /// Position among the backend's devices, from 0.
    pub ordinal: u32,
    /// The silicon.
    pub uuid: DeviceUuid,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.ordinal)
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId({self} {})", self.uuid)
    }
}

/// Names one queue for as long as its device lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct QueueId {
    /// The queue's device.
    pub device: DeviceId,
    /// Position among the queues that were made on the device, from 0.
    pub number: u32,
}

impl fmt::Display for QueueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue {} of {}", self.number, self.device)
    }
}

/// One submission to one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct SubmissionId {
    /// The queue.
    pub queue: QueueId,
    /// Position among the queue's submissions, from 0.
    pub index: u64,
}

impl fmt::Display for SubmissionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "submission {} of {}", self.index, self.queue)
    }
}

/// The piece of work that an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkId {
    /// An operation of a submission.
    Operation {
        /// The submission.
        submission: SubmissionId,
        /// Position among its operations, from 0, where each node of a graph that has work is one.
        position: u32,
    },
    /// A workgroup of a resident kernel.
    Resident {
        /// The resident's device.
        device: DeviceId,
        /// The workgroup's position in its grid, counted along x, then y, then z.
        workgroup: u32,
    },
}

impl fmt::Display for WorkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation { submission, position } => write!(f, "operation {position} of {submission}"),
            Self::Resident { device, workgroup } => write!(f, "workgroup {workgroup} resident on {device}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_survives_its_own_text() {
        let uuid = DeviceUuid::from_bytes(*b"0123456789abcdef");
        assert_eq!(uuid.to_string().parse(), Ok(uuid));
        assert_eq!(format!("GPU-{uuid}").parse(), Ok(uuid));
    }

    #[test]
    fn uuid_of_another_length_is_refused() {
        for text in
            ["", "GPU-", "0123", "0123456789abcdef0123456789abcdef00", "+123456789abcdef0123456789abcdef"]
        {
            assert!(text.parse::<DeviceUuid>().is_err(), "{text}");
        }
    }

    #[test]
    fn pci_address_reads_every_common_spelling() {
        let expected = PciAddress { domain: 0, bus: 0x1b, device: 0, function: 0 };
        for text in ["1b:00.0", "0000:1B:00.0", "00000000:1B:00.0"] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        assert_eq!(expected.to_string(), "0000:1b:00.0");
    }

    #[test]
    fn damaged_pci_addresses_are_refused() {
        for text in ["", "1b", "1b:00", "1b:20.0", "1b:00.8", "100:00.0", "0:0:1b:00.0", ":.", "x:1b:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
