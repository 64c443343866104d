// A resident that counts its turns, to see whether residents work.
#include <warpweft/resident.cuh>

extern "C" __global__ void beat(ww_slice slice, volatile unsigned int* turns) {
    ww_turn turn;
    if (ww_begin(slice, turn)) {
        while (!ww_should_yield(slice, turn)) *turns = *turns + 1;
    }
    ww_end(slice, false);
}
