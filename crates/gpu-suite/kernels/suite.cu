// The kernels of the GPU suite. Every loop ends by itself: by the timer, and by a count should the timer stand
// still.
#include <warpweft/resident.cuh>

typedef unsigned int u32;
typedef unsigned long long u64;

// How long a loop may go on. A round takes `round_ns` at least, so that the count never ends one early.
struct bound {
    u64 began;
    u64 ns;
    u64 rounds;
};

__device__ __forceinline__ bound at_most(u64 ns, u64 round_ns) { return {ww_now(), ns, ns / round_ns}; }

__device__ __forceinline__ bool goes_on(bound& loop) {
    return ww_now() - loop.began < loop.ns && loop.rounds-- != 0;
}

// The least that a round takes: of a loop that reads the timer, and of one that polls memory too.
#define TIMED_NS 4
#define POLLED_NS 64

// Turns of a slice, far more than the longest one has time for.
#define MOST_TURNS (1u << 24)

extern "C" __global__ void nothing() {}

// out = 3 * out + digit: the order of such steps shows in the result.
extern "C" __global__ void step(u32* out, u32 digit) {
    *out = 3 * *out + digit;
}

// Takes `ns`, ten seconds at most, then counts.
extern "C" __global__ void hold(u32* out, u64 ns) {
    bound loop = at_most(ns < 10000000000ull ? ns : 10000000000ull, TIMED_NS);
    while (goes_on(loop)) {}
    *out += 1;
}

extern "C" __global__ void fault(u32* out) {
    *out = 1;
    __trap();
}

// Stores to an address that nobody mapped.
extern "C" __global__ void stray(u32* out, u64 address) {
    *out = 1;
    asm volatile("st.volatile.global.u32 [%0], %1;" :: "l"(address), "r"(1u) : "memory");
}

// Does not run with more threads than these.
extern "C" __global__ void __launch_bounds__(128) narrow(u32* out) { *out = 1; }

// Turns 96 words around. Loads and stores keep their order, so that a thread has all of the words at once; nothing
// tells the compiler to make do with fewer registers for a large workgroup.
extern "C" __global__ void hungry(volatile u32* words) {
    if (threadIdx.x != 0) return;
    u32 kept[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) kept[i] = words[i];
#pragma unroll
    for (int i = 0; i < 96; ++i) words[i] = kept[95 - i];
}

// A resident without slices, for comparison: until its word is set, or for five seconds. Block 0 polls the
// host, the others a word of the device.
extern "C" __global__ void raw_resident(volatile u32* stop, volatile u32* beat, volatile u32* fan, u32 number) {
    bound loop = at_most(5000000000ull, POLLED_NS);
    if (blockIdx.x == 0) *beat = number;
    volatile u32* word = blockIdx.x == 0 ? stop : fan;
    while (*word != number && goes_on(loop)) {}
    if (blockIdx.x == 0) *fan = number;
}

// A resident that counts its turns, shows its slice's number to the host and keeps the gaps between slices.
// gaps: how many, when the last slice ended, and 4,096 of them in nanoseconds.
extern "C" __global__ void beat(ww_slice slice, u64* turns, volatile u64* shown, u64* gaps) {
    __shared__ bool leave;
    bool served = false;
    ww_turn turn;
    const u32 block = ww_block_index() & 127;
    if (threadIdx.x == 0) {
        served = ww_begin(slice, turn);
        leave = !served;
        if (block == 0 && !leave) {
            shown[0] = slice.number + 1;
            if (gaps[1] != 0) gaps[2 + (gaps[0]++ & 4095)] = turn.began - gaps[1];
        }
    }
#pragma unroll 1
    for (u32 turned = 0; turned < MOST_TURNS; ++turned) {
        __syncthreads();
        if (leave) break;
        __syncthreads();
        if (threadIdx.x == 0) {
            turns[block] += 1;
            leave = ww_should_yield(slice, turn);
        }
    }
    if (threadIdx.x == 0) {
        if (block == 0 && served) gaps[1] = ww_now();
        ww_end(slice, false);
    }
}

// Is done for good at its third slice.
extern "C" __global__ void brief(ww_slice slice, u32* out) {
    ww_turn turn;
    if (ww_begin(slice, turn)) {
#pragma unroll 1
        for (u32 turned = 0; turned < MOST_TURNS && !ww_should_yield(slice, turn); ++turned) {}
        *out += 1;
    }
    ww_end(slice, *out >= 3);
}

// One load of 16 bytes from anywhere.
__device__ __forceinline__ uint4 line_at(u64 address) {
    uint4 line;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w) : "l"(address) : "memory");
    return line;
}

// Answers a record of 48 bytes in four lines of 12 bytes and the record's number, each polled by a lane of its
// own: one line with the sums of the record's columns. Returns whether the record was there.
__device__ __forceinline__ bool answer(const uint4& line, u64 reply, u32 number) {
    if (!__all_sync(0xffffffff, threadIdx.x >= 4 || line.w == number)) return false;
    uint4 sum = line;
    for (int step = 2; step > 0; step /= 2) {
        sum.x += __shfl_xor_sync(0xffffffff, sum.x, step);
        sum.y += __shfl_xor_sync(0xffffffff, sum.y, step);
        sum.z += __shfl_xor_sync(0xffffffff, sum.z, step);
    }
    if (threadIdx.x == 0) {
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(reply), "r"(sum.x), "r"(sum.y), "r"(sum.z), "r"(number) : "memory");
    }
    return true;
}

// Never returns by itself, but for ten seconds without a record. A record with this number is the last.
extern "C" __global__ void raw_answer(u64 request, u64 reply, u32 last) {
    const u64 place = request + 16 * (threadIdx.x & 3);
    const u64 patience = 10000000000ull;
    bound loop = at_most(patience, POLLED_NS);
    for (u32 number = 1; number <= last;) {
        const uint4 line = line_at(place);
        if (answer(line, reply, number)) {
            loop = at_most(patience, POLLED_NS);
            ++number;
        }
        if (__any_sync(0xffffffff, !goes_on(loop))) return;
    }
}

// The same as a resident. Lane 4 reads its orders along with the lines, in the same load.
extern "C" __global__ void sliced_answer(ww_slice slice, u64* request, uint4* reply, u32* served) {
    ww_turn turn;
    bool stays = false;
    if (threadIdx.x == 4) stays = ww_begin(slice, turn);
    stays = __any_sync(0xffffffff, stays);
    u32 number = *served + 1;
    const u64 place = threadIdx.x == 4 ? slice.orders : (u64)request + 16 * (threadIdx.x & 3);
#pragma unroll 1
    for (u32 turned = 0; stays && turned < MOST_TURNS; ++turned) {
        const uint4 line = line_at(place);
        // The answer first: what the orders say can wait.
        if (answer(line, (u64)reply, number)) ++number;
        bool leave = false;
        if (threadIdx.x == 4) {
            ww_heard(slice, turn, {line.x | (u64)line.y << 32, line.z | (u64)line.w << 32});
            leave = ww_should_yield(slice, turn);
        }
        stays = !__any_sync(0xffffffff, leave);
    }
    if (threadIdx.x == 4) {
        *served = number - 1;
        ww_end(slice, false);
    }
}
