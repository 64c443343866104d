//! Placement without contention, by strategy, beside an uncontended lock.
//!
//! Run: `cargo bench -p warpweft-benches --bench coordinator`

use std::sync::Mutex;

use warpweft::{Backend as _, Features, host::HostBackend};
use warpweft_benches::beside_floor;
use warpweft_coordinator::{Coordinator, CoordinatorConfig, PlacementRequest, Strategy};

fn main() -> anyhow::Result<()> {
    for devices in [8, 64] {
        for (name, strategy) in [
            ("first_available", Strategy::FirstAvailable),
            ("least_loaded", Strategy::LeastLoaded),
            ("round_robin", Strategy::RoundRobin),
            ("most_memory", Strategy::MostMemory),
            ("near_peers", Strategy::NearPeers),
        ] {
            placement(devices, name, strategy)?;
        }
    }
    Ok(())
}

fn placement(devices: u32, name: &str, strategy: Strategy) -> anyhow::Result<()> {
    let backend = HostBackend::with_devices(devices)?;
    let coordinator = Coordinator::new(CoordinatorConfig::default())?;
    for ordinal in 0..devices {
        coordinator.register(backend.open(ordinal, Features::empty())?)?;
    }
    let (peer, _) = coordinator.place(&PlacementRequest::default())?;
    let near_peers = matches!(strategy, Strategy::NearPeers);
    let peers = near_peers.then_some(peer).into_iter().collect();
    let request = PlacementRequest { strategy: Some(strategy), peers, ..PlacementRequest::default() };
    // A placement and its release, so that the devices never fill.
    let mut place = || {
        let (kernel, _) = coordinator.place(&request)?;
        coordinator.release(kernel)?;
        Ok(())
    };
    let lock = Mutex::new(0_u64);
    let mut locks = || {
        for _ in 0..2 {
            *std::hint::black_box(&lock).lock().map_err(|_| anyhow::anyhow!("poisoned"))? += 1;
        }
        Ok(())
    };
    beside_floor(&format!("place+release/{devices}/{name}"), 20_000, &mut place, &mut locks)
}
