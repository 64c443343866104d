//! A graph over two devices and the host, without a word about who waits for whom:
//! `cargo run -p warpweft --features graph-runtime --example graph`

use std::time::Duration;

use warpweft::{
    FillRegion, Runtime,
    graph_runtime::{self, HostTask, MemoryPlacement, NodeDesc, RuntimeConfig, Usage},
    host::HostBackend,
};

type Failure = Box<dyn std::error::Error>;

const WITHIN: Duration = Duration::from_secs(10);

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Failure> {
    let opened = Runtime::builder().backend(HostBackend::with_devices(2)?).build()?;
    let [first, second] = opened.devices() else { return Err("two were asked for".into()) };
    let runtime = graph_runtime::Runtime::new(opened.devices().iter().cloned(), RuntimeConfig::default())?;

    let rows = runtime.allocate(&MemoryPlacement::Device(first.info().id), 4096)?;
    let result = runtime.allocate(&MemoryPlacement::HostVisible(second.info().id), 4096)?;
    let double = HostTask::fallible(|context| {
        let doubled: Vec<u8> = context.bytes(0)?.into_iter().map(|byte| 2 * byte).collect();
        Ok(context.write(0, 0, &doubled)?)
    });

    let mut graph = runtime.graph();
    let low = graph.fill(FillRegion::bytes(&rows.slice(0..2048)?, 3))?;
    let high = graph.fill(FillRegion::bytes(&rows.slice(2048..4096)?, 7))?;
    let copied = graph.copy(rows.view(), result.view())?;
    let own = [(result.view().clone(), Usage::ReadWrite)];
    graph.add(NodeDesc::task(&double, &own).named("double"))?;

    // The halves have nothing to do with each other, and the copy needs both.
    assert_eq!(graph.predecessors(copied), [low, high]);
    for reason in graph.why(high, copied) {
        println!("{}", graph.explain(&reason));
    }

    let prepared = graph.prepare()?;
    prepared.submit()?.wait(WITHIN)?;
    let bytes = runtime.read(result.view(), WITHIN)?.to_vec()?;
    assert_eq!((bytes[0], bytes[4095]), (6, 14));
    println!("{} pieces were handed over", prepared.segment_count());
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_ends_well() -> Result<(), super::Failure> {
        super::main()
    }
}
