// The kernels of `warpweft graph` and `warpweft perf graph`: what the command's Rust functions do, for devices that
// run CUDA.

typedef unsigned int u32;
typedef unsigned long long u64;

// A workgroup's share: 4,096 words.
#define SHARE 4096ull

extern "C" __global__ void scale(u32* words, u64 count, u32 factor) {
    const u64 first = SHARE * blockIdx.x;
    const u64 end = first + SHARE < count ? first + SHARE : count;
    for (u64 word = first + threadIdx.x; word < end; word += blockDim.x) words[word] *= factor;
}

extern "C" __global__ void add(u32* to, const u32* from, u64 count) {
    const u64 first = SHARE * blockIdx.x;
    const u64 end = first + SHARE < count ? first + SHARE : count;
    for (u64 word = first + threadIdx.x; word < end; word += blockDim.x) to[word] += from[word];
}

// Words beyond the ends count as 0.
extern "C" __global__ void stencil(u32* to, const u32* from, u64 count) {
    const u64 first = SHARE * blockIdx.x;
    const u64 end = first + SHARE < count ? first + SHARE : count;
    for (u64 word = first + threadIdx.x; word < end; word += blockDim.x) {
        const u32 left = word > 0 ? from[word - 1] : 0;
        const u32 right = word + 1 < count ? from[word + 1] : 0;
        to[word] = left + from[word] + right;
    }
}

// One thread: the least that a node can do.
extern "C" __global__ void tick(u32* word) { word[0] += 1; }

extern "C" __global__ void blend(u32* to, const u32* left, const u32* middle, const u32* right) {
    to[0] = left[0] + middle[0] + right[0];
}
