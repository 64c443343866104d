// The suite's kernels for queues. Every loop ends by itself.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u64 now_ns() {
    u64 ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

// Position of a workgroup counted along x, then y, then z.
__device__ __forceinline__ u32 linear() {
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

extern "C" __global__ void number(u32* out, u32 base) {
    out[linear()] = linear() + base;
}

extern "C" __global__ void increment(u32* to, const u32* from, u32 count) {
    for (u32 index = 0; index < count; index++) to[index] = from[index] + 1;
}

extern "C" __global__ void empty() {}

// Until the word is set, for ten seconds at most: a kernel that hangs takes the machine with it.
extern "C" __global__ void blocking(const volatile u32* word) {
    const u64 began = now_ns();
    while (*word == 0 && now_ns() - began < 10000000000ull) {}
}

extern "C" __global__ void failing(u32* words) {
    *words = 1;
    __trap();
}
