// What a resident kernel finds beside its own code; see the crate page.
struct WwSlice {
    turns: u32,
    leave: atomic<u32>,
    reserved: array<u32, 2>,
    progress: array<atomic<u32>>,
}
@group(1) @binding(0) var<storage, read_write> ww_slice: WwSlice;
const WW_INSIDE: u32 = 1u;
const WW_BUSY: u32 = 2u;
const WW_IDLE: u32 = 3u;
const WW_FINISHED: u32 = 4u;
const WW_FAILED: u32 = 256u;
fn ww_begin(workgroup: u32) -> u32 {
    if atomicLoad(&ww_slice.progress[workgroup]) == WW_FINISHED {
        return 0u;
    }
    atomicStore(&ww_slice.progress[workgroup], WW_INSIDE);
    return ww_slice.turns;
}
fn ww_should_yield(turns: ptr<function, u32>) -> bool {
    if *turns == 0u || atomicLoad(&ww_slice.leave) != 0u {
        return true;
    }
    *turns = *turns - 1u;
    return false;
}
fn ww_end(workgroup: u32, progress: u32) {
    if atomicLoad(&ww_slice.progress[workgroup]) != WW_FINISHED {
        atomicStore(&ww_slice.progress[workgroup], progress);
    }
}
