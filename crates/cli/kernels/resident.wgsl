// A resident that counts its turns, to see whether residents work.

@group(0) @binding(0) var<storage, read_write> count: u32;

@compute @workgroup_size(1)
fn beat() {
    var turns = ww_begin(0u);
    while !ww_should_yield(&turns) {
        count = count + 1u;
    }
    ww_end(0u, WW_BUSY);
}
