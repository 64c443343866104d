// The kernels of the GPU suite for Vulkan devices. Every loop ends by itself.

struct Scalars {
    value: u32,
}
var<immediate> scalars: Scalars;

@group(0) @binding(0) var<storage, read_write> target_words: array<u32>;
@group(0) @binding(1) var<storage, read> source_words: array<u32>;

@compute @workgroup_size(1)
fn nothing() {}

// Each round depends on the one before, so that no compiler leaves the loop out.
@compute @workgroup_size(1)
fn spin() {
    var state = 1u;
    for (var round = 0u; round < scalars.value; round++) {
        state = state * 1664525u + 1013904223u;
    }
    target_words[0] = state;
}

@compute @workgroup_size(1)
fn mark() {
    target_words[0] = scalars.value;
}

// A word of each page of 4,096 bytes, one by each workgroup.
@compute @workgroup_size(1)
fn gather(@builtin(workgroup_id) page: vec3<u32>) {
    target_words[page.x] = source_words[1024u * page.x];
}
