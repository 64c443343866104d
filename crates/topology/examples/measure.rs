//! Times queries on a cluster of 128 machines with 8 devices each, and imports of the files named on the command line.
//!
//! Run in release: `cargo run --release -p warpweft-topology --example measure -- FILE...`.
//! Prints the median, the 99th percentile and the maximum of each, in microseconds.
#![expect(clippy::print_stdout, reason = "a program speaks to its user")]

use std::{error::Error, fs, hint::black_box, time::Instant};

use warpweft_core_types::{Bandwidth, Bytes, LinkClass, PathClass};
use warpweft_topology::{
    BuildError, DeviceKind, LinkDesc, NodeDesc, NodeId, NodeKind, Provenance, Topology, discover,
    import::import,
};

fn main() -> Result<(), Box<dyn Error>> {
    let cluster = cluster(128, 8)?;
    let devices: Vec<NodeId> = cluster.devices().map(|device| device.id).collect();
    let degree = devices.iter().map(|device| cluster.edges_from(*device).len()).max();
    println!(
        "cluster: {} nodes, {} edges, device degree {}",
        cluster.nodes().len(),
        cluster.edges().len(),
        degree.unwrap_or_default()
    );
    let pair = |round: usize| {
        let from = devices[round * 7_919 % devices.len()];
        let to = devices[(round * 104_729 + 511) % devices.len()];
        (from, to)
    };
    let path = |bytes: Bytes| {
        let cluster = &cluster;
        move |round: usize| {
            let (from, to) = pair(round);
            black_box(cluster.best_path(from, to, bytes).is_ok());
        }
    };
    time("best_path, 64 KiB, 1,024 devices", 2_000, path(Bytes::kib(64)));
    time("best_path, 1 GiB, 1,024 devices", 2_000, path(Bytes::gib(1)));
    time("best_paths, 4 of them", 100, |round| {
        let (from, to) = pair(round);
        black_box(cluster.best_paths(from, to, Bytes::mib(1), 4).is_ok());
    });
    time("nearest_devices", 200, |round| {
        black_box(cluster.nearest_devices(devices[round % devices.len()], Bytes::mib(1)).is_ok());
    });
    time("ring of 16 devices, exact", 20, |_| {
        black_box(cluster.ring(&devices[..16]).is_ok());
    });
    time("ring of 1,024 devices", 3, |_| {
        black_box(cluster.ring(&devices).is_ok());
    });
    time("broadcast_tree of 1,024 devices", 3, |_| {
        black_box(cluster.broadcast_tree(&devices, 2).is_ok());
    });
    let pair_of_machines = self::cluster(2, 8)?;
    time("bisection of 16 devices, exact", 5, |_| {
        black_box(pair_of_machines.bisection_bandwidth());
    });
    let machines = self::cluster(16, 8)?;
    time("bisection of 128 devices, bounds", 1, |_| {
        black_box(machines.bisection_bandwidth());
    });
    time("to_svg of one machine", 50, |_| {
        black_box(pair_of_machines.to_svg());
    });
    time("discover /sys", 20, |_| {
        black_box(discover("/sys".as_ref()));
    });
    for file in std::env::args().skip(1) {
        let bytes = fs::read(&file)?;
        let name = file.rsplit('/').next().unwrap_or(&file);
        time(name, 20, |_| {
            black_box(import(&bytes).is_ok());
        });
    }
    Ok(())
}

/// Machines of GPUs behind one switch fabric, half of them near each of two NUMA nodes, with as many network cards on one big switch.
fn cluster(machines: usize, gpus: usize) -> Result<Topology, BuildError> {
    let mut builder = Topology::builder();
    let leaf = builder.node(NodeDesc::new("network", NodeKind::Switch))?;
    let file = |class| LinkDesc::new(class, Provenance::File);
    let rate = Bandwidth::from_gb_per_s;
    for machine in 0..machines {
        let host = format!("node{machine}");
        let mut here: Vec<(NodeId, NodeId)> = Vec::new();
        let mut memories = Vec::new();
        for numa_node in 0..2 {
            let mut memory = NodeDesc::host(numa_node).on(&host);
            memory.name = format!("{host}/NUMA{numa_node}");
            memories.push(builder.node(memory)?);
        }
        builder.link_both(memories[0], memories[1], file(LinkClass::HostMemory).bandwidth(rate(60.0)))?;
        for gpu in 0..gpus {
            let numa_node = u32::from(gpu >= gpus / 2);
            let place = |desc: NodeDesc| desc.on(&host).near(numa_node);
            let device =
                builder.node(place(NodeDesc::device(format!("{host}/GPU{gpu}"), DeviceKind::Gpu)))?;
            let nic = builder.node(place(NodeDesc::new(format!("{host}/NIC{gpu}"), NodeKind::Nic)))?;
            let pcie = file(LinkClass::Pcie).bandwidth(rate(63.0));
            builder.link_both(device, memories[usize::from(gpu >= gpus / 2)], pcie)?;
            builder.link_both(nic, leaf, file(LinkClass::Network).bandwidth(rate(50.0)))?;
            builder.link_both(device, nic, pcie.path(PathClass::Pix))?;
            for &(other, other_nic) in &here {
                let fabric = file(LinkClass::NvSwitch).link_count(18).bandwidth(rate(450.0));
                builder.link_both(device, other, fabric)?;
                builder.link_both(device, other_nic, pcie.path(PathClass::Node))?;
                builder.link_both(other, nic, pcie.path(PathClass::Node))?;
            }
            here.push((device, nic));
        }
    }
    Ok(builder.build())
}

fn time(name: &str, rounds: usize, mut work: impl FnMut(usize)) {
    work(0);
    let mut micros: Vec<f64> = (0..rounds)
        .map(|round| {
            let start = Instant::now();
            work(round);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    let at = |part: usize| micros[(micros.len() - 1) * part / 100];
    println!("{name:<60} median {:>10.1}  p99 {:>10.1}  max {:>10.1} us", at(50), at(99), at(100));
}
