//! Processes that find each other: `warpweft launch -n 4 -- target/debug/examples/group`.
//!
//! Build it with `cargo build -p warpweft --features bootstrap --example group`. Without a launcher it is a
//! group of one.

use std::time::Duration;

use warpweft::bootstrap::{EnvironmentError, Group, JoinError, Rank};

const WITHIN: Duration = Duration::from_secs(30);

#[expect(clippy::print_stdout, reason = "printing is what an example does")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = match Group::from_environment(WITHIN) {
        Err(JoinError::Environment(EnvironmentError::NoLauncher)) => Group::alone()?,
        joined => joined?,
    };
    let id = group.broadcast("id", Rank(0), b"an id that rank 0 made", WITHIN)?;
    let pids = group.all_gather("pids", std::process::id().to_string().as_bytes(), WITHIN)?;
    let pids: Vec<_> = pids.iter().map(|pid| String::from_utf8_lossy(pid)).collect();
    println!(
        "rank {} of {}: {}, processes {}",
        group.rank(),
        group.size(),
        String::from_utf8_lossy(&id),
        pids.join(" ")
    );
    // Nobody leaves while others still call.
    group.barrier("end", WITHIN)?;
    Ok(())
}
