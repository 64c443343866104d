// The command's kernels: what its Rust functions do, for devices that run WGSL.
// A number of words is a pair of 32-bit words, since not every device has wider ones; the lower one is enough for
// what a kernel can be given.

struct PatternScalars {
    count: vec2<u32>,
    seed: u32,
}
var<immediate> pattern_scalars: PatternScalars;

struct CopyScalars {
    count: vec2<u32>,
}
var<immediate> copy_scalars: CopyScalars;

@group(0) @binding(0) var<storage, read_write> target_words: array<u32>;
@group(0) @binding(1) var<storage, read> source_words: array<u32>;

@compute @workgroup_size(1)
fn empty() {}

// Words that depend on their position and a seed; a workgroup writes 4,096 of them.
@compute @workgroup_size(256)
fn pattern(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) thread: vec3<u32>) {
    let first = 4096u * group.x;
    let end = min(first + 4096u, pattern_scalars.count.x);
    for (var index = first + thread.x; index < end; index += 256u) {
        let mixed = (index * 0x9e3779b1u) ^ (pattern_scalars.seed * 0x85ebca6bu);
        target_words[index] = mixed ^ (mixed >> 15u);
    }
}

// All workgroups together.
@compute @workgroup_size(1024)
fn copy_words(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    for (var word = id.x; word < copy_scalars.count.x; word += 1024u * groups.x) {
        target_words[word] = source_words[word];
    }
}
