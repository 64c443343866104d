// The kernels of random graphs: what they leave depends on everything they read, and on the order of writers.

struct Scalars {
    to_count: u32,
    from_count: u32,
    seed: u32,
}
var<immediate> scalars: Scalars;

@group(0) @binding(0) var<storage, read_write> target_words: array<u32>;
@group(0) @binding(1) var<storage, read> source_words: array<u32>;
@group(0) @binding(0) var<storage, read_write> sums: array<atomic<u32>>;

struct AddScalars {
    count: u32,
    seed: u32,
}
var<immediate> add_scalars: AddScalars;

fn hash() -> u32 {
    var hash = scalars.seed;
    for (var index = 0u; index < scalars.from_count; index++) {
        hash = (hash * 16777619u) ^ source_words[index];
    }
    return hash;
}

@compute @workgroup_size(1)
fn mix_write() {
    let hash = hash();
    for (var index = 0u; index < scalars.to_count; index++) {
        target_words[index] = hash + index;
    }
}

@compute @workgroup_size(1)
fn mix_update() {
    let hash = hash();
    for (var index = 0u; index < scalars.to_count; index++) {
        target_words[index] = target_words[index] * 31u + hash + index;
    }
}

@compute @workgroup_size(1)
fn add_words() {
    for (var index = 0u; index < add_scalars.count; index++) {
        atomicAdd(&sums[index], add_scalars.seed + index);
    }
}
