// The kernels of the figures and checks of graphs. Every loop ends by itself: by a count, and by the timer where one
// waits.
#include <warpweft/resident.cuh>

typedef unsigned int u32;
typedef unsigned long long u64;

// These two do nothing with what they are given: what is timed is everything around them.
extern "C" __global__ void visit(u32* to, const u32* from) {}
extern "C" __global__ void visit_three(u32* to, const u32* left, const u32* middle, const u32* right) {}

// out = 3 * out + digit: the order of such steps shows in the result.
extern "C" __global__ void step(u32* out, u32 digit) { *out = 3 * *out + digit; }

// The same once `ns` have passed, a tenth of a second at most: whoever does not wait for it is found out.
extern "C" __global__ void linger(u32* out, u32 digit, u64 ns) {
    const u64 began = ww_now();
    const u64 most = ns < 100000000ull ? ns : 100000000ull;
    // A round takes 4 ns at least, so that the count ends nothing early.
    for (u64 round = 0; round <= most / 4 && ww_now() - began < most; ++round) {}
    *out = 3 * *out + digit;
}

extern "C" __global__ void trap(u32* out) {
    *out = 1;
    __trap();
}

// Turns each word of a chunk over as often as it is told, 65,536 times at most. A block has 1,024 words, and blocks
// beyond the chunk have none.
#define CHUNK_WORDS (2u << 20)
#define BLOCK_WORDS 1024u
#define MOST_ROUNDS 65536u
extern "C" __global__ void work(u32* words, u32 rounds) {
    const u32 most = rounds < MOST_ROUNDS ? rounds : MOST_ROUNDS;
    if (blockIdx.x >= CHUNK_WORDS / BLOCK_WORDS) return;
    u32* own = words + blockIdx.x * BLOCK_WORDS;
    for (u32 at = threadIdx.x; at < BLOCK_WORDS; at += blockDim.x) {
        u32 word = own[at];
        for (u32 round = 0; round < most; ++round) word = (word ^ (word >> 7)) * 1664525u + 1013904223u;
        own[at] = word;
    }
}
