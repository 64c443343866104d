// The kernels of `warpweft graph` and `warpweft perf graph`: what the command's Rust functions do, for devices that
// run WGSL. A number of words is a pair of 32-bit words, of which the lower one is enough.

struct ScaleScalars {
    count: vec2<u32>,
    factor: u32,
}
var<immediate> scale_scalars: ScaleScalars;

struct CountScalars {
    count: vec2<u32>,
}
var<immediate> count_scalars: CountScalars;

@group(0) @binding(0) var<storage, read_write> target_words: array<u32>;
@group(0) @binding(1) var<storage, read> source_words: array<u32>;
@group(0) @binding(2) var<storage, read> middle_words: array<u32>;
@group(0) @binding(3) var<storage, read> right_words: array<u32>;

// A workgroup's share.
const SHARE: u32 = 4096u;

@compute @workgroup_size(256)
fn scale(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) thread: vec3<u32>) {
    let first = SHARE * group.x;
    let end = min(first + SHARE, scale_scalars.count.x);
    for (var word = first + thread.x; word < end; word += 256u) {
        target_words[word] = target_words[word] * scale_scalars.factor;
    }
}

@compute @workgroup_size(256)
fn add(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) thread: vec3<u32>) {
    let first = SHARE * group.x;
    let end = min(first + SHARE, count_scalars.count.x);
    for (var word = first + thread.x; word < end; word += 256u) {
        target_words[word] = target_words[word] + source_words[word];
    }
}

// Words beyond the ends count as 0.
@compute @workgroup_size(256)
fn stencil(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) thread: vec3<u32>) {
    let first = SHARE * group.x;
    let count = count_scalars.count.x;
    let end = min(first + SHARE, count);
    for (var word = first + thread.x; word < end; word += 256u) {
        var sum = source_words[word];
        if (word > 0u) { sum += source_words[word - 1u]; }
        if (word + 1u < count) { sum += source_words[word + 1u]; }
        target_words[word] = sum;
    }
}

// One thread: the least that a node can do.
@compute @workgroup_size(1)
fn tick() {
    target_words[0] = target_words[0] + 1u;
}

@compute @workgroup_size(1)
fn blend() {
    target_words[0] = source_words[0] + middle_words[0] + right_words[0];
}
