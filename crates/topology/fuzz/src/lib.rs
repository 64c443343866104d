//! What every fuzz target of this crate checks.

use warpweft_topology::{
    Topology,
    import::{Format, Imported, import_as},
};

/// Imports `bytes` as `format`; what is accepted must be drawable and survive our own format.
///
/// # Panics
///
/// If it does not, which is what fuzzing looks for.
pub fn check(format: Format, bytes: &[u8]) {
    let Ok(Imported { topology, .. }) = import_as(format, bytes) else {
        return;
    };
    let back = Topology::from_json(&topology.to_json()).expect("our own format is read back");
    assert_eq!(back, topology);
    // Pictures grow with the square of the devices; small ones show the same faults.
    if topology.nodes().len() <= 64 {
        topology.to_svg();
        topology.to_matrix();
        topology.to_dot();
        topology.to_nccl_xml();
    }
}
