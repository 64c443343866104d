// The suite's residents. A batch ends with its turns, or when it is told to.

@group(0) @binding(0) var<storage, read_write> counts: array<u32>;
@group(0) @binding(0) var<storage, read_write> request: atomic<u32>;
@group(0) @binding(1) var<storage, read_write> answer: u32;

@compute @workgroup_size(1)
fn counter(@builtin(workgroup_id) id: vec3<u32>) {
    var turns = ww_begin(id.x);
    while !ww_should_yield(&turns) {
        counts[id.x] = counts[id.x] + 1u;
    }
    ww_end(id.x, WW_BUSY);
}

// Answers with the successor, until it is asked for the last number.
@compute @workgroup_size(1)
fn server() {
    _ = ww_begin(0u);
    let asked = atomicLoad(&request);
    if asked == 0xffffffffu {
        ww_end(0u, WW_FINISHED);
    } else {
        answer = asked + 1u;
        ww_end(0u, WW_IDLE);
    }
}

// Stays, whatever it is told, until the word is set.
@compute @workgroup_size(1)
fn stubborn() {
    _ = ww_begin(0u);
    for (var looks = 0u; looks < 67108864u; looks++) {
        if atomicLoad(&request) != 0u {
            break;
        }
    }
    ww_end(0u, WW_BUSY);
}

@compute @workgroup_size(1)
fn failing_resident(@builtin(workgroup_id) id: vec3<u32>) {
    _ = ww_begin(id.x);
    ww_end(id.x, WW_FAILED + 7u);
}
