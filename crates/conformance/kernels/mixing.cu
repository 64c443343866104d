// The kernels of random graphs: what they leave depends on everything they read, and on the order of writers.

static __device__ unsigned hash_of(const unsigned *source, unsigned count, unsigned seed)
{
    unsigned hash = seed;
    for (unsigned index = 0; index < count; index++) {
        hash = hash * 16777619u ^ source[index];
    }
    return hash;
}

extern "C" __global__ void mix_write(unsigned *to, const unsigned *from, unsigned to_count, unsigned from_count,
                                     unsigned seed)
{
    unsigned hash = hash_of(from, from_count, seed);
    for (unsigned index = 0; index < to_count; index++) {
        to[index] = hash + index;
    }
}

extern "C" __global__ void mix_update(unsigned *to, const unsigned *from, unsigned to_count, unsigned from_count,
                                      unsigned seed)
{
    unsigned hash = hash_of(from, from_count, seed);
    for (unsigned index = 0; index < to_count; index++) {
        to[index] = to[index] * 31u + hash + index;
    }
}

extern "C" __global__ void add_words(unsigned *sums, unsigned count, unsigned seed)
{
    for (unsigned index = 0; index < count; index++) {
        atomicAdd(&sums[index], seed + index);
    }
}
