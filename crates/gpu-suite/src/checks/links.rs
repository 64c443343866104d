//! Links between devices, and what crosses them.

use anyhow::{Context as _, Result, ensure};
use warpweft_core_types::{
    BufferDesc, CopyRegion, FillRegion, GraphNode, LinkClass, LinkEnd, LinkFact, Op, PreparedGraph,
    Provenance,
};

use crate::{
    nvml::Nvml,
    rig::{NotRun, Rig},
};

/// There and back on the first device's graph, by memory of the second.
pub(super) fn peer_copies_in_a_graph(rig: &Rig) -> Result<()> {
    const BYTES: u64 = 1 << 20;
    let (near, far) = rig.pair()?;
    let [source, back] =
        [near.allocate(BufferDesc::device(BYTES))?, near.allocate(BufferDesc::device(BYTES))?];
    let there = far.allocate(BufferDesc::device(BYTES))?;
    let fill = Op::Fill(FillRegion::bytes(&source, 0x3c));
    let out = Op::Copy(CopyRegion::new(&source, &there)?);
    let home = Op::Copy(CopyRegion::new(&there, &back)?);
    let nodes = [GraphNode::new(&fill, &[]), GraphNode::new(&out, &[0]), GraphNode::new(&home, &[1])];
    let mut graph = PreparedGraph::new(near.device.as_ref(), &nodes)?;
    for byte in [0x3c, 0x5a] {
        graph.set(0, &Op::Fill(FillRegion::bytes(&source, byte)))?;
        near.run(&[Op::Fill(FillRegion::bytes(&back, 0)), Op::Replay(&graph)])?;
        for (place, found) in [("the other device", far.read(&there)?), ("this one", near.read(&back)?)] {
            ensure!(found.iter().all(|&found| found == byte), "{byte:#x} did not arrive on {place}");
        }
    }
    Ok(())
}

/// Case T2: every pair that NVML calls NVLink, by a question of ours, is one with a number of links, and no
/// medium between devices is a guess.
pub(super) fn nvlinks(rig: &Rig) -> Result<()> {
    rig.pair()?;
    let nvml = Nvml::open().map_err(|error| NotRun(format!("{error:#}")))?;
    for one in &rig.devices {
        let facts = one.device.links().context("links")?.facts();
        for other in &rig.devices {
            let (from, to) = (one.device.info().id.uuid, other.device.info().id.uuid);
            if from != to {
                let ends = (LinkEnd::Device(from), LinkEnd::Device(to));
                let fact = facts.iter().find(|fact| (fact.from, fact.to) == ends);
                judge(fact, nvml.is_nvlink(from, to)?)?;
            }
        }
    }
    Ok(())
}

/// Whether a fact says what NVML says.
fn judge(fact: Option<&LinkFact>, is_nvlink: bool) -> Result<()> {
    let Some(fact) = fact else {
        ensure!(!is_nvlink, "nothing is known of a pair that NVML calls NVLink");
        return Ok(());
    };
    ensure!(fact.provenance != Provenance::Assumed, "a guess: {fact:?}");
    let is_known_as_such = matches!(fact.class, LinkClass::NvLink | LinkClass::NvSwitch);
    ensure!(is_known_as_such == is_nvlink, "NVML's word is {is_nvlink}: {fact:?}");
    ensure!(!is_nvlink || fact.link_count > 0, "no links: {fact:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use warpweft_core_types::DeviceUuid;

    use super::*;

    #[test]
    fn a_fact_is_held_against_the_word_of_nvml() {
        let [from, to] = [1, 2].map(|byte| LinkEnd::Device(DeviceUuid::from_bytes([byte; 16])));
        let fact = |class, link_count, provenance| LinkFact {
            from,
            to,
            class,
            path: None,
            link_count,
            bandwidth: None,
            latency: None,
            provenance,
        };
        let check = |class, count, provenance, is_nvlink, is_right| {
            let fact = fact(class, count, provenance);
            assert_eq!(judge(Some(&fact), is_nvlink).is_ok(), is_right, "{fact:?} {is_nvlink}");
        };
        check(LinkClass::NvSwitch, 18, Provenance::Driver, true, true);
        check(LinkClass::NvLink, 4, Provenance::Driver, true, true);
        check(LinkClass::NvLink, 0, Provenance::Driver, true, false);
        check(LinkClass::Pcie, 1, Provenance::Driver, true, false);
        check(LinkClass::Pcie, 1, Provenance::Driver, false, true);
        check(LinkClass::NvSwitch, 18, Provenance::Driver, false, false);
        check(LinkClass::NvSwitch, 18, Provenance::Assumed, true, false);
        assert!(judge(None, false).is_ok() && judge(None, true).is_err());
    }
}
