// The device's clock: nanoseconds, the same for all multiprocessors.
__device__ __forceinline__ unsigned long long now() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

// Writes the time.
extern "C" __global__ void ww_stamp(unsigned long long* out) { *out = now(); }

// Answers the host's questions, numbered from 1, in host memory: `words[0]` is the number of the last question,
// `words[i]` receives the time at which question `i` was seen. Gives up `limit_ns` after the last answer.
extern "C" __global__ void ww_exchange(volatile unsigned long long* words, unsigned int questions,
                                       unsigned long long limit_ns) {
    for (unsigned int question = 1; question <= questions; ++question) {
        const unsigned long long began = now();
        while (words[0] < question) {
            if (now() - began > limit_ns) return;
        }
        words[question] = now();
    }
}

// Keeps one thread busy for a while: to see whether a launch returns before its kernel does.
extern "C" __global__ void ww_busy(unsigned long long ns) {
    const unsigned long long began = now();
    while (now() - began < ns) {
    }
}
