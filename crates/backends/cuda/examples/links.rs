//! What the driver and NVML say of the links of this machine's GPUs, and where it is from.
//!
//! `cargo run -p warpweft-cuda --example links`
#![expect(clippy::print_stdout, reason = "an example shows something")]

use std::error::Error;

use warpweft_core_types::{Backend, Features, LinkEnd};
use warpweft_cuda::CudaBackend;

fn main() -> Result<(), Box<dyn Error>> {
    let backend = CudaBackend::new()?;
    for note in backend.notes() {
        println!("{note}");
    }
    let infos = backend.devices()?;
    let name = |end| match end {
        LinkEnd::Device(uuid) => infos
            .iter()
            .find(|info| info.id.uuid == uuid)
            .map_or_else(|| uuid.to_string(), |info| info.id.to_string()),
        LinkEnd::Host { numa_node } => format!("host:{numa_node}"),
    };
    for info in &infos {
        let device = backend.open(info.id.ordinal, Features::LINK_FACTS)?;
        let facts = device.links().map(|links| links.facts()).unwrap_or_default();
        for fact in facts.iter().filter(|fact| fact.from == LinkEnd::Device(info.id.uuid)) {
            let path = fact.path.map_or_else(|| "-".to_owned(), |path| path.to_string());
            let rate = fact.bandwidth.map_or_else(|| "unknown".to_owned(), |rate| rate.to_string());
            println!(
                "{} -> {}: {} x{}, {path}, {rate} ({:?})",
                name(fact.from),
                name(fact.to),
                fact.class,
                fact.link_count,
                fact.provenance
            );
        }
    }
    Ok(())
}
