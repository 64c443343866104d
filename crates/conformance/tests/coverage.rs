//! Every method of the seam is exercised by some case.

/// The files of core-types that declare the seam's traits.
const SEAM: &[&str] = &[
    include_str!("../../core-types/src/buffer.rs"),
    include_str!("../../core-types/src/clock.rs"),
    include_str!("../../core-types/src/collective.rs"),
    include_str!("../../core-types/src/device.rs"),
    include_str!("../../core-types/src/graph.rs"),
    include_str!("../../core-types/src/interop.rs"),
    include_str!("../../core-types/src/kernel.rs"),
    include_str!("../../core-types/src/queue.rs"),
    include_str!("../../core-types/src/resident.rs"),
    include_str!("../../core-types/src/semaphore.rs"),
    include_str!("../../core-types/src/sharing.rs"),
];

/// `Trait::method` for every method of every public trait, read from rustfmt's layout.
fn declared_methods(source: &str) -> Vec<String> {
    let (mut methods, mut current) = (Vec::new(), None);
    for line in source.lines() {
        if let Some(rest) = line.strip_prefix("pub trait ") {
            current = rest.split([':', ' ', '{']).next();
        } else if line == "}" {
            current = None;
        } else if let (Some(name), Some(rest)) = (current, line.strip_prefix("    fn ")) {
            let method = rest.split(['(', '<']).next().unwrap_or_default();
            methods.push(format!("{name}::{method}"));
        }
    }
    methods
}

#[test]
fn every_method_of_the_seam_has_a_case() {
    let declared: Vec<String> = SEAM.iter().flat_map(|source| declared_methods(source)).collect();
    assert!(declared.contains(&"Device::allocate".to_owned()), "the traits were found: {declared:?}");
    assert!(declared.len() > 50, "most methods were found: {declared:?}");
    let uncovered = warpweft_conformance::uncovered_methods(&declared);
    assert!(uncovered.is_empty(), "no case covers {uncovered:?}; name them in a case's `covers`");
}
