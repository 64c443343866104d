//! What devices say of their links.

use warpweft_core_types::{CopyRegion, Features, LinkEnd, Op};

use crate::{
    context::Context,
    harness::{Case, Verdict},
};

pub(super) const CASES: &[Case] = &[
    Case::new("link::facts_name_known_devices", facts_name_known_devices)
        .needs(Features::LINK_FACTS)
        .covers(&["Links::facts"]),
    Case::new("link::facts_agree_with_access", facts_agree_with_access)
        .needs(Features::LINK_FACTS.union(Features::PEER_ACCESS))
        .devices(2)
        .covers(&["Peers::access"]),
    Case::new("link::traffic_counts_copies", traffic_counts_copies)
        .needs(Features::LINK_FACTS.union(Features::PEER_ACCESS))
        .devices(2)
        .when(counts_its_link)
        .covers(&["Links::traffic"]),
];

fn facts_name_known_devices(cx: &Context) -> Verdict {
    let own = LinkEnd::Device(cx.infos[0].id.uuid);
    for fact in cx.device(0).links().ok_or("the family is absent")?.facts() {
        assert!(fact.from == own || fact.to == own, "a device reports its own links: {fact:?}");
        assert!(fact.from != fact.to && fact.link_count >= 1, "{fact:?}");
        for end in [fact.from, fact.to] {
            if let LinkEnd::Device(uuid) = end {
                assert!(cx.infos.iter().any(|info| info.id.uuid == uuid), "{fact:?}");
            }
        }
    }
    Ok(())
}

fn facts_agree_with_access(cx: &Context) -> Verdict {
    let facts = cx.device(0).links().ok_or("the family is absent")?.facts();
    let end = |device: usize| LinkEnd::Device(cx.infos[device].id.uuid);
    let linked = facts.iter().any(|fact| fact.from == end(0) && fact.to == end(1));
    let access = cx.device(0).peers().ok_or("the family is absent")?.access(cx.infos[1].id);
    assert!(linked || !access.write, "what is written to crosses a link");
    let own = cx.device(0).peers().ok_or("the family is absent")?.access(cx.infos[0].id);
    assert!(own.read && own.write, "a device reaches its own memory");
    Ok(())
}

/// Bytes that device 0 counts on its link to device 1.
fn counted(cx: &Context) -> Option<u64> {
    let traffic = cx.device(0).links()?.traffic();
    let end = |device: usize| LinkEnd::Device(cx.infos[device].id.uuid);
    traffic.iter().find(|link| link.from == end(0) && link.to == end(1)).map(|link| link.bytes)
}

fn counts_its_link(cx: &Context) -> Result<(), &'static str> {
    counted(cx).map(|_| ()).ok_or("device 0 does not count bytes to device 1")
}

fn traffic_counts_copies(cx: &Context) -> Verdict {
    let before = counted(cx).ok_or("it was counted just now")?;
    let (source, target) = (cx.memory(0, 12_345)?, cx.memory(1, 12_345)?);
    cx.lane(0)?.run(&[Op::Copy(CopyRegion::new(&source, &target)?)])?;
    assert_eq!(counted(cx), Some(before + 12_345));
    Ok(())
}
