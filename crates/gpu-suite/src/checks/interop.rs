//! Streams, memory and contexts of other libraries.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use warpweft_core_types::{
    Access, BufferDesc, BufferView, CopyRegion, Features, FillRegion, GraphNode, InteropError, NativeHandle,
    Op, PreparedGraph, Queue, QueueDesc, Submission, SubmitError,
};
use warpweft_cuda::{ADDRESS, CONTEXT, STREAM};

use crate::{
    adapter::Tensor,
    bench::raw::{self, Raw},
    rig::{Bench, LIMIT, Rig, submit_word},
};

pub(super) fn current_context(rig: &Rig) -> Result<()> {
    let before = raw::current_context()?;
    let bench = rig.first();
    let view = bench.uploaded(&[1; 4096])?;
    ensure!(bench.read(&view)? == [1; 4096]);
    ensure!(raw::current_context()? == before, "another context is current");
    Ok(())
}

pub(super) fn by_turns(rig: &Rig) -> Result<()> {
    let raw = Raw::open(0)?;
    raw_by_turns(rig, &raw, raw.stream_handle())
}

pub(super) fn by_turns_by_default(rig: &Rig) -> Result<()> {
    raw_by_turns(rig, &Raw::open(0)?.on_the_default_stream(), 0)
}

fn raw_by_turns(rig: &Rig, raw: &Raw, stream: u64) -> Result<()> {
    let interop = rig.first().device.interop().context("interop")?;
    let handle = NativeHandle { kind: STREAM, value: stream };
    let queue = interop.import_queue(raw::native_queue(handle), &QueueDesc { capacity: 4096 })?;
    let word = BufferView::whole(interop.import_buffer(raw::native_memory(raw.word(), 4))?);
    raw.clear_word()?;
    let step = raw.kernel("step")?;
    rounds(rig.first(), queue.as_ref(), &word, &mut || raw.launch_step(step))?;
    ensure!(interop.queue_handle(queue.as_ref())?.kind == STREAM);
    Ok(())
}

/// By the adapter: cudarc's own launches and ours, on cudarc's stream and tensor.
pub(super) fn by_turns_with_cudarc(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let tensor = Tensor::new()?;
    let queue = tensor.import_stream(bench.device.as_ref(), &QueueDesc { capacity: 4096 })?;
    let word = BufferView::whole(tensor.import(bench.device.as_ref())?);
    let expected = rounds(bench, queue.as_ref(), &word, &mut || tensor.launch_step())?;
    let found = tensor.read()?;
    ensure!(found == expected, "cudarc reads {found} and not {expected}");
    Ok(())
}

/// Both sides work on the other library's memory in its stream, without the host in between. The result shows
/// the order of all steps.
fn rounds(
    bench: &Bench,
    queue: &dyn Queue,
    word: &BufferView,
    their_step: &mut dyn FnMut() -> Result<()>,
) -> Result<u32> {
    const ROUNDS: u32 = 1000;
    let our_step = bench.kernel("step")?;
    for round in 0..ROUNDS {
        their_step()?;
        submit_word(queue, &our_step, word, &(round + 2).to_le_bytes(), &[], &[])?;
    }
    let done = bench.point()?;
    queue.submit(&Submission { signals: std::slice::from_ref(&done), ..Submission::default() })?;
    done.wait(LIMIT)?;
    let expected = stepped((0..ROUNDS).flat_map(|round| [1, round + 2]));
    let found = bench.read_word(word)?;
    ensure!(found == expected, "{found} and not {expected}");
    Ok(expected)
}

/// Digits that `step` was given, in order, as its word shows them.
pub(super) fn stepped(digits: impl IntoIterator<Item = u32>) -> u32 {
    digits.into_iter().fold(0, |word: u32, digit| word.wrapping_mul(3).wrapping_add(digit))
}

/// A fill by the raw driver, between operations of ours, replayed.
pub(super) fn captured(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let interop = bench.device.interop().context("interop")?;
    let [first, second] =
        [bench.allocate(BufferDesc::device(4096))?, bench.allocate(BufferDesc::device(4096))?];
    let address = interop.buffer_handle(first.buffer().as_ref())?;
    ensure!(address.kind == ADDRESS);
    let accesses = vec![(first.clone(), Access::Write)];
    let work = interop
        .capture(accesses, Arc::new(()), &mut |stream| Ok(raw::fill(stream, address, 0x0505_0505, 1024)?))?;
    let clear = Op::Fill(FillRegion::bytes(&first, 1));
    let copy = Op::Copy(CopyRegion::new(&first, &second)?);
    let nodes = [GraphNode::new(&clear, &[]), GraphNode::new(work, &[0]), GraphNode::new(&copy, &[1])];
    let graph = PreparedGraph::new(bench.device.as_ref(), &nodes)?;
    for _ in 0..100 {
        bench.run(&[Op::Fill(FillRegion::bytes(&second, 9)), Op::Replay(&graph)])?;
    }
    ensure!(bench.read(&second)? == [5; 4096], "the fill is not between the two");
    let refused = interop.capture(Vec::new(), Arc::new(()), &mut |stream| Ok(raw::synchronise(stream)?));
    ensure!(matches!(refused, Err(InteropError::Capture { .. })), "{refused:?}");
    bench.run(&[Op::Replay(&graph)])
}

/// Works, and its memory is not the primary context's.
pub(super) fn other_context(rig: &Rig) -> Result<()> {
    let (context, handle) = raw::new_context(0)?;
    let device = rig.backend.open_context(context, Features::empty())?;
    let interop = device.interop().context("interop")?.device_handle();
    ensure!(interop == NativeHandle { kind: CONTEXT, value: handle }, "{interop}");
    let bench = Bench::open(device)?;
    let view = bench.uploaded(&[7; 4096])?;
    ensure!(bench.read(&view)? == [7; 4096]);
    let own = rig.first().allocate(BufferDesc::device(4096))?;
    let ops = [Op::Copy(CopyRegion::new(&view, &own)?)];
    let refused = rig.first().queue.submit(&Submission { ops: &ops, ..Submission::default() });
    ensure!(matches!(refused, Err(SubmitError::Foreign { what: "buffer", .. })), "{refused:?}");
    Ok(())
}

pub(super) fn refused_imports(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let interop = bench.device.interop().context("interop")?;
    let import = |value| {
        let queue = raw::native_queue(NativeHandle { kind: STREAM, value });
        interop.import_queue(queue, &QueueDesc::default()).err()
    };
    let per_thread = import(2);
    ensure!(matches!(&per_thread, Some(InteropError::Refused { .. })), "{per_thread:?}");
    if let Ok((_, second)) = rig.pair() {
        let elsewhere = import(Raw::open(1)?.stream_handle());
        ensure!(matches!(&elsewhere, Some(InteropError::Refused { .. })), "{elsewhere:?}");
        let memory = second.allocate(BufferDesc::device(4096))?;
        let address = second.device.interop().context("interop")?.buffer_handle(memory.buffer().as_ref())?;
        let elsewhere = interop.import_buffer(raw::native_memory(address.value, 4096)).err();
        ensure!(matches!(&elsewhere, Some(InteropError::Refused { .. })), "{elsewhere:?}");
    }
    let raw = Raw::open(0)?;
    let long = interop.import_buffer(raw::native_memory(raw.word(), 1 << 40)).err();
    ensure!(matches!(&long, Some(InteropError::Refused { .. })), "{long:?}");
    let host = interop.import_buffer(raw::native_memory(raw.pin(4096)?.0, 4096)).err();
    ensure!(matches!(&host, Some(InteropError::Refused { .. })), "{host:?}");
    Ok(())
}
