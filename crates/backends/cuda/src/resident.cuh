// What a resident kernel needs. Its first parameter is a `ww_slice`, by value, which warpweft provides; the
// parameters of the contract follow. One thread of each block makes these calls and tells the others.
//
//     extern "C" __global__ void serve(ww_slice slice, State* state) {
//         __shared__ bool leave;
//         ww_turn turn;
//         if (threadIdx.x == 0) leave = !ww_begin(slice, turn);
//         __syncthreads();
//         while (!leave) {
//             ...one message, by all threads...
//             __syncthreads();
//             if (threadIdx.x == 0) leave = ww_should_yield(slice, turn);
//             __syncthreads();
//         }
//         if (threadIdx.x == 0) ww_end(slice, false);
//     }
#ifndef WARPWEFT_RESIDENT_CUH
#define WARPWEFT_RESIDENT_CUH

// What one block tells the host, in host memory.
struct ww_block {
    unsigned long long entered;   // number of the last slice it began, plus 1
    unsigned long long left;      // number of the last slice it ended, plus 1
    unsigned long long finished;  // 1 once it is done for good
    unsigned long long unused;
};

// Which slices are to end; both numbers only rise. 16 bytes at a multiple of 16: one load.
struct ww_orders {
    unsigned long long leave;  // slices below this number return at the next message boundary
    unsigned long long hurry;  // slices below this one return there once `shortest_ns` is over
};

// What the last block to leave a slice tells the host. 16 bytes at a multiple of 16: one store.
struct ww_parting {
    unsigned long long left;    // number of the slice that every block has left, plus 1
    unsigned long long obeyed;  // the `leave` that later slices find when they begin
};

struct ww_slice {
    unsigned long long orders;  // a `ww_orders` in host memory, read by block 0 alone; behind it a `ww_parting`
    unsigned long long mirror;  // in device memory: what block 0 last read there, for the other blocks; behind
                                // it how often a block has left a slice
    unsigned long long blocks;  // a `ww_block` for each block, in host memory
    unsigned long long done;    // a word for each block, in device memory: 1 once it is done for good
    unsigned long long shortest_ns;
    unsigned long long longest_ns;
    unsigned long long number;
};

// What one thread remembers during a slice.
struct ww_turn {
    unsigned long long began;
    unsigned long long looked;
    ww_orders orders;
};

__device__ __forceinline__ unsigned long long ww_now() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

__device__ __forceinline__ unsigned int ww_block_index() {
    return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

__device__ __forceinline__ ww_orders ww_read_orders(unsigned long long from) {
    ww_orders orders;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(orders.leave), "=l"(orders.hurry) : "l"(from) : "memory");
    return orders;
}

// Begins a slice; false if there is nothing to do in it: this block said before that it is done for good, or
// the slice was told to leave before it began.
__device__ __forceinline__ bool ww_begin(const ww_slice& slice, ww_turn& turn) {
    const unsigned int block = ww_block_index();
    turn.began = ww_now();
    turn.looked = turn.began;
    // A slice that was queued behind one that was told to leave learns it here, without a trip to the host.
    turn.orders = ww_read_orders(slice.mirror);
    volatile ww_block* mine = reinterpret_cast<volatile ww_block*>(slice.blocks) + block;
    mine->entered = slice.number + 1;
    return slice.number >= turn.orders.leave
        && reinterpret_cast<volatile unsigned int*>(slice.done)[block] == 0;
}

// Takes note of orders that block 0 has read, and passes them on to the other blocks. `ww_should_yield` does so
// by itself; a kernel whose first block polls the host anyway reads them along with what it polls for, in one
// load of a warp, and calls this instead.
__device__ __forceinline__ void ww_heard(const ww_slice& slice, ww_turn& turn, ww_orders seen) {
    if (seen.leave != turn.orders.leave || seen.hurry != turn.orders.hurry) {
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};"
                     :: "l"(slice.mirror), "l"(seen.leave), "l"(seen.hurry) : "memory");
    }
    turn.orders = seen;
    turn.looked = ww_now();
}

// Whether to return at this message boundary. Cheap: it looks for orders every microsecond or two.
__device__ __forceinline__ bool ww_should_yield(const ww_slice& slice, ww_turn& turn) {
    const unsigned long long now = ww_now();
    const bool first = ww_block_index() == 0;
    // Polling host memory costs a trip over PCIe, and many blocks that do it slow down every fence.
    if (now - turn.looked >= (first ? 1000 : 500) && slice.number >= turn.orders.leave) {
        const ww_orders seen = ww_read_orders(first ? slice.orders : slice.mirror);
        if (first) {
            ww_heard(slice, turn, seen);
        } else {
            turn.orders = seen;
            turn.looked = now;
        }
    }
    const unsigned long long lasted = now - turn.began;
    return slice.number < turn.orders.leave || lasted >= slice.longest_ns
        || (slice.number < turn.orders.hurry && lasted >= slice.shortest_ns);
}

// Ends a slice: the block's last act. `finished` says that it is done for good.
__device__ __forceinline__ void ww_end(const ww_slice& slice, bool finished) {
    const unsigned int block = ww_block_index();
    volatile ww_block* mine = reinterpret_cast<volatile ww_block*>(slice.blocks) + block;
    if (finished) {
        reinterpret_cast<volatile unsigned int*>(slice.done)[block] = 1;
        mine->finished = 1;
    }
    mine->left = slice.number + 1;
    // What the block wrote comes before the count, and so before whatever the last block does.
    __threadfence();
    // Slices of one resident follow each other, so the count of all of them tells the end of each.
    const unsigned long long blocks = (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
    const unsigned long long before = atomicAdd(reinterpret_cast<unsigned long long*>(slice.mirror) + 2, 1ULL);
    if ((before + 1) % blocks == 0) {
        const ww_orders last = ww_read_orders(slice.mirror);
        // Whoever told slices to leave goes on to read what they wrote. Other slices are spared the fence.
        if (slice.number < last.leave) {
            __threadfence_system();
        }
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};"
                     :: "l"(slice.orders + 16), "l"(slice.number + 1), "l"(last.leave) : "memory");
    }
}

#endif
