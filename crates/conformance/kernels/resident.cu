// The suite's residents. A slice ends when it is told to, or after ten seconds at most.
#include <warpweft/resident.cuh>

typedef unsigned int u32;
typedef unsigned long long u64;

extern "C" __global__ void counter(ww_slice slice, volatile u32* counts) {
    ww_turn turn;
    if (ww_begin(slice, turn)) {
        while (!ww_should_yield(slice, turn)) counts[ww_block_index()] = counts[ww_block_index()] + 1;
    }
    ww_end(slice, false);
}

// Answers with the successor, until it is asked for the last number.
extern "C" __global__ void server(ww_slice slice, const volatile u32* request, volatile u32* answer) {
    ww_turn turn;
    bool finished = false;
    if (ww_begin(slice, turn)) {
        while (!finished && !ww_should_yield(slice, turn)) {
            const u32 asked = *request;
            finished = asked == 0xffffffffu;
            if (!finished) *answer = asked + 1;
        }
    }
    ww_end(slice, finished);
}

// Stays, whatever it is told, until the word is set.
extern "C" __global__ void stubborn(ww_slice slice, const volatile u32* release) {
    ww_turn turn;
    if (ww_begin(slice, turn)) {
        while (*release == 0 && ww_now() - turn.began < 10000000000ull) {}
        while (!ww_should_yield(slice, turn)) {}
    }
    ww_end(slice, false);
}

extern "C" __global__ void failing_resident(ww_slice slice, const u32* word) {
    ww_turn turn;
    if (ww_begin(slice, turn)) __trap();
    ww_end(slice, false);
}
