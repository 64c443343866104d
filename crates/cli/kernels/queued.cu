// The command's kernels: what its Rust functions do, for devices that run CUDA.

typedef unsigned int u32;
typedef unsigned long long u64;

extern "C" __global__ void empty() {}

// Words that depend on their position and a seed; a workgroup writes 4,096 of them.
extern "C" __global__ void pattern(u32* words, u64 count, u32 seed) {
    const u64 first = 4096ull * blockIdx.x;
    const u64 end = first + 4096 < count ? first + 4096 : count;
    for (u64 index = first + threadIdx.x; index < end; index += blockDim.x) {
        const u32 mixed = (u32)index * 0x9e3779b1u ^ seed * 0x85ebca6bu;
        words[index] = mixed ^ (mixed >> 15);
    }
}

// All workgroups together; four lines of 16 bytes a thread are under way where both sides are aligned to them.
extern "C" __global__ void copy_words(u32* __restrict__ to, const u32* __restrict__ from, u64 count) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 own = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool aligned = ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) & 15) == 0;
    const u64 lines = aligned ? count / 4 : 0;
    uint4* const to_lines = reinterpret_cast<uint4*>(to);
    const uint4* const from_lines = reinterpret_cast<const uint4*>(from);
    u64 line = own;
    for (; line + 3 * step < lines; line += 4 * step) {
        const uint4 a = from_lines[line], b = from_lines[line + step];
        const uint4 c = from_lines[line + 2 * step], d = from_lines[line + 3 * step];
        to_lines[line] = a;
        to_lines[line + step] = b;
        to_lines[line + 2 * step] = c;
        to_lines[line + 3 * step] = d;
    }
    for (; line < lines; line += step) to_lines[line] = from_lines[line];
    for (u64 word = 4 * lines + own; word < count; word += step) to[word] = from[word];
}
