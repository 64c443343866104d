//! PCI Express speeds.

use serde::{Deserialize, Serialize};
use warpweft_core_types::Bandwidth;

/// A PCI Express link of one function, as trained now and as it could be.
///
/// An idle device often runs its link slower than it can, so `max` is what to plan with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcieLink {
    /// As trained when it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<PcieRate>,
    /// The most the function can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<PcieRate>,
}

impl PcieLink {
    /// Bytes per second of one direction: of `max` if known, else of `current`.
    pub fn bandwidth(&self) -> Option<Bandwidth> {
        self.max.or(self.current).map(PcieRate::bandwidth)
    }
}

/// Speed and width of a PCI Express link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcieRate {
    /// Megatransfers per second and lane: 2,500 for the first generation, 64,000 for the sixth.
    pub mt_per_s: u32,
    /// Lanes.
    pub lanes: u32,
}

impl PcieRate {
    /// Reads the speed and width that Linux and NCCL print: `16.0 GT/s PCIe` and `16`.
    ///
    /// `None` if either is unknown: empty, `Unknown`, zero, or not a number.
    pub fn parse(speed: &str, width: &str) -> Option<Self> {
        let gt_per_s: f64 = speed.split_whitespace().next()?.parse().ok()?;
        let lanes: u32 = width.trim().parse().ok()?;
        // The bounds leave room for generations to come and keep the products below in range.
        if !(0.1..=1_000.0).contains(&gt_per_s) || !(1..=64).contains(&lanes) {
            return None;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "rounded and between 100 and 1,000,000"
        )]
        let mt_per_s = (gt_per_s * 1_000.0).round() as u32;
        Some(Self { mt_per_s, lanes })
    }

    /// Bytes per second of one direction after line coding.
    ///
    /// 8b/10b to 5 GT/s, 128b/130b to 32 GT/s, and 242 of 256 bytes of a flit above (PCI Express Base Specification 6.0, sections 4.2.1 to 4.2.3).
    pub fn bandwidth(self) -> Bandwidth {
        let efficiency = match self.mt_per_s {
            0..=5_000 => 8.0 / 10.0,
            5_001..=32_000 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        };
        let bits_per_s = f64::from(self.mt_per_s) * f64::from(self.lanes) * efficiency / 1_000.0;
        Bandwidth::from_gb_per_s(bits_per_s / 8.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_follow_the_line_coding_of_each_generation() {
        let check = |speed: &str, expected: f64| {
            let got = PcieRate::parse(speed, "16").unwrap().bandwidth().gb_per_s;
            assert!((got - expected).abs() < 0.01, "{speed}: {got}");
        };
        check("2.5 GT/s", 4.0);
        check("5 GT/s", 8.0);
        check("8.0 GT/s PCIe", 15.75);
        check("16 GT/s", 31.51);
        check("32.0 GT/s PCIe", 63.02);
        check("64.0 GT/s PCIe", 121.0);
    }

    #[test]
    fn unknown_is_not_zero() {
        for (speed, width) in [
            ("", "0"),
            ("Unknown", "16"),
            ("8 GT/s", "0"),
            ("0 GT/s", "16"),
            ("NaN", "16"),
            ("1e300", "16"),
            ("8 GT/s", "-1"),
        ] {
            assert_eq!(PcieRate::parse(speed, width), None, "{speed} x{width}");
        }
    }
}
