// The suite's kernels for queues. Every loop ends by itself.

struct Scalars {
    value: u32,
}
var<immediate> scalars: Scalars;

@group(0) @binding(0) var<storage, read_write> target_words: array<u32>;
@group(0) @binding(1) var<storage, read> source_words: array<u32>;
@group(0) @binding(0) var<storage, read_write> flag: atomic<u32>;

@compute @workgroup_size(1)
fn number(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>) {
    let position = id.x + count.x * (id.y + count.y * id.z);
    target_words[position] = position + scalars.value;
}

@compute @workgroup_size(1)
fn increment() {
    for (var index = 0u; index < scalars.value; index++) {
        target_words[index] = source_words[index] + 1u;
    }
}

@compute @workgroup_size(1)
fn empty() {}

// Until the word is set, for so many looks at most: a kernel that hangs takes the machine with it.
@compute @workgroup_size(1)
fn blocking() {
    for (var looks = 0u; looks < 67108864u; looks++) {
        if atomicLoad(&flag) != 0u {
            break;
        }
    }
}
