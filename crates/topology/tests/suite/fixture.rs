//! Tables and trees written for these tests, one for every layout the importers know.

use warpweft_topology::import::Format;

/// A text in one of the formats.
pub(crate) struct Fixture {
    pub(crate) name: &'static str,
    pub(crate) format: Format,
    pub(crate) text: &'static str,
}

macro_rules! fixtures {
    ($($format:ident: $($name:literal),+;)+) => {
        pub(crate) const FIXTURES: &[Fixture] = &[$($(Fixture {
            name: $name,
            format: Format::$format,
            text: include_str!(concat!("fixtures/", $name)),
        }),+),+];
    };
}

fixtures! {
    SmiMatrix:
        "matrix-1-soc.txt",
        "matrix-2-node.txt",
        "matrix-3-numa.txt",
        "matrix-4-nic-legend.txt",
        "matrix-5-switch.txt",
        "matrix-6-grace.txt",
        "matrix-7-markdown.txt",
        "matrix-8-colour.txt",
        "matrix-9-comment.txt",
        "matrix-10-one-gpu.txt",
        "matrix-11-wrapped.txt",
        "matrix-12-missing-nic-row.txt";
    SmiP2p: "p2p-raw.txt", "p2p-markdown.txt", "p2p-nvlink.txt";
    SmiNvLink: "nvlink.txt";
    RocmSmi: "rocm-pairs.txt";
    XpuSmi: "xpu.txt";
    NcclXml: "nccl-switch.xml", "nccl-direct.xml", "nccl-by-class.xml", "nccl-c2c.xml", "rccl.xml";
    HwlocXml: "hwloc-1.xml", "hwloc-2.xml", "hwloc-3.xml";
}

/// The text with this name.
pub(crate) fn fixture(name: &str) -> &'static str {
    let found = FIXTURES.iter().find(|fixture| fixture.name == name);
    found.expect("a test names a fixture that exists").text
}
