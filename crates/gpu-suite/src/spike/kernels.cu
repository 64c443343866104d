// The kernels of the spike. Every loop ends by itself.
#include <warpweft/resident.cuh>

typedef unsigned int u32;
typedef unsigned long long u64;

extern "C" __global__ void nothing() {}

// 65,536 words: out = a + b + plus.
extern "C" __global__ void add(const u32* a, const u32* b, u32* out, u32 plus) {
    const u32 i = (blockIdx.x * blockDim.x + threadIdx.x) & 0xffff;
    out[i] = a[i] + b[i] + plus;
}

// out = 3 * out + digit: the order of such steps shows in the result.
extern "C" __global__ void step(u32* out, u32 digit) {
    *out = 3 * *out + digit;
}

// Takes `ns`, two seconds at most, then counts.
extern "C" __global__ void hold(u32* out, u64 ns) {
    const u64 began = ww_now();
    const u64 most = ns < 2000000000ull ? ns : 2000000000ull;
    while (ww_now() - began < most) {}
    *out += 1;
}

extern "C" __global__ void fault(u32* out) {
    *out = 1;
    __trap();
}

// A resident without slices, for comparison: until its word is set, or for five seconds. Block 0 polls the
// host, the others a word of the device.
extern "C" __global__ void raw_resident(volatile u32* stop, volatile u32* beat, volatile u32* fan, u32 number) {
    const u64 began = ww_now();
    if (blockIdx.x == 0) *beat = number;
    volatile u32* word = blockIdx.x == 0 ? stop : fan;
    while (*word != number && ww_now() - began < 5000000000ull) {}
    if (blockIdx.x == 0) *fan = number;
}

// A resident that counts its turns, shows its slice's number to the host and keeps the gaps between slices.
// gaps: how many, when the last slice ended, and 4,096 of them in nanoseconds.
extern "C" __global__ void beat(ww_slice slice, u64* turns, volatile u64* shown, u64* gaps) {
    __shared__ bool leave;
    ww_turn turn;
    const u32 block = ww_block_index() & 127;
    if (threadIdx.x == 0) {
        leave = !ww_begin(slice, turn);
        if (block == 0) {
            shown[0] = slice.number + 1;
            if (gaps[1] != 0) gaps[2 + (gaps[0]++ & 4095)] = turn.began - gaps[1];
        }
    }
    while (true) {
        __syncthreads();
        if (leave) break;
        __syncthreads();
        if (threadIdx.x == 0) {
            turns[block] += 1;
            leave = ww_should_yield(slice, turn);
        }
    }
    if (threadIdx.x == 0) {
        if (block == 0) gaps[1] = ww_now();
        ww_end(slice, false);
    }
}

// Does not return when it is told to, for 300 ms.
extern "C" __global__ void stubborn(ww_slice slice, u32* out) {
    ww_turn turn;
    ww_begin(slice, turn);
    while (ww_now() - turn.began < 300000000ull) {}
    *out += 1;
    ww_end(slice, false);
}

// Is done for good at its third slice.
extern "C" __global__ void brief(ww_slice slice, u32* out) {
    ww_turn turn;
    if (ww_begin(slice, turn)) {
        while (!ww_should_yield(slice, turn)) {}
        *out += 1;
    }
    ww_end(slice, *out >= 3);
}
