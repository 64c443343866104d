// Reduces what ranks have put side by side: `ranks` inputs of `word_count` words each, `stride` words apart, behind the
// place for the result, which is as long. A word holds one element of 32 bits, two of 16 or four of 8; elements of 64 bits
// take two. Ranks are taken in order, and small floats are rounded once, so the result is the same on every device.

#include "elements.cuh"

struct Inputs {
    const unsigned *words;
    unsigned ranks;
    unsigned stride;

    __device__ unsigned at(unsigned rank, unsigned word) const {
        return words[(unsigned long long)(rank + 1) * stride + word];
    }
};

static __device__ float float_at(unsigned type, unsigned word, unsigned shift) {
    switch (type) {
    case F16: return from_f16((word >> shift) & 0xffff);
    case BF16: return __uint_as_float((word >> shift) << 16);
    default: return __uint_as_float(word);
    }
}

static __device__ unsigned reduce_floats(Inputs in, unsigned type, unsigned op, unsigned word, unsigned shift) {
    float value = float_at(type, in.at(0, word), shift);
    for (unsigned rank = 1; rank < in.ranks; rank++)
        value = of_floats(op, value, float_at(type, in.at(rank, word), shift));
    if (op == AVG)
        value /= (float)in.ranks;
    switch (type) {
    case F16: return to_f16(value) << shift;
    case BF16: return to_bf16(value) << shift;
    default: return __float_as_uint(value);
    }
}

// The `width` bits from `shift` on, extended by what the type extends with.
template <typename T> static __device__ T integer_at(unsigned word, unsigned shift, unsigned width) {
    unsigned rest = 32 - width;
    return (T)(word << (rest - shift)) >> rest;
}

template <typename T>
static __device__ unsigned reduce_integers(Inputs in, bool truth, unsigned op, unsigned word, unsigned shift,
                                           unsigned width) {
    T value = integer_at<T>(in.at(0, word), shift, width);
    value = truth ? value != 0 : value;
    for (unsigned rank = 1; rank < in.ranks; rank++) {
        T other = integer_at<T>(in.at(rank, word), shift, width);
        value = of_integers<T>(op, value, truth ? other != 0 : other);
    }
    if (op == AVG)
        value = integer_at<T>((unsigned)value, 0, width) / (T)in.ranks;
    return integer_at<unsigned>((unsigned)value, 0, width) << shift;
}

template <typename T>
static __device__ unsigned reduce_parts(Inputs in, bool truth, unsigned op, unsigned word, unsigned width) {
    unsigned result = 0;
    for (unsigned shift = 0; shift < 32; shift += width)
        result |= reduce_integers<T>(in, truth, op, word, shift, width);
    return result;
}

static __device__ unsigned reduce_word(Inputs in, unsigned type, unsigned op, unsigned word) {
    switch (type) {
    case F32: return reduce_floats(in, type, op, word, 0);
    case F16:
    case BF16: return reduce_floats(in, type, op, word, 0) | reduce_floats(in, type, op, word, 16);
    case I32: return reduce_parts<int>(in, false, op, word, 32);
    case I16: return reduce_parts<int>(in, false, op, word, 16);
    case I8: return reduce_parts<int>(in, false, op, word, 8);
    case U32: return reduce_parts<unsigned>(in, false, op, word, 32);
    case U16: return reduce_parts<unsigned>(in, false, op, word, 16);
    default: return reduce_parts<unsigned>(in, type == BOOL, op, word, 8);
    }
}

static __device__ unsigned long long long_at(Inputs in, unsigned rank, unsigned word) {
    return in.at(rank, word) | (unsigned long long)in.at(rank, word + 1) << 32;
}

static __device__ bool is_less(unsigned type, unsigned long long a, unsigned long long b) {
    return type == I64 ? (long long)a < (long long)b : a < b;
}

static __device__ unsigned long long reduce_long(Inputs in, unsigned type, unsigned op, unsigned word) {
    unsigned long long value = long_at(in, 0, word);
    for (unsigned rank = 1; rank < in.ranks; rank++) {
        unsigned long long other = long_at(in, rank, word);
        switch (op) {
        case MIN: value = is_less(type, other, value) ? other : value; break;
        case MAX: value = is_less(type, value, other) ? other : value; break;
        case AND: value &= other; break;
        case OR: value |= other; break;
        case XOR: value ^= other; break;
        default: value += other;
        }
    }
    return value;
}

extern "C" __global__ void reduce(unsigned *words, unsigned word_count, unsigned ranks, unsigned stride,
                                  unsigned code) {
    Inputs in = {words, ranks, stride};
    unsigned type = code >> 16, op = code & 0xffff, first = blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned word = first; word < word_count; word += gridDim.x * blockDim.x) {
        if (type != I64 && type != U64) {
            words[word] = reduce_word(in, type, op, word);
        } else if (word % 2 == 0) {
            unsigned long long value = reduce_long(in, type, op, word);
            words[word] = (unsigned)value;
            words[word + 1] = (unsigned)(value >> 32);
        }
    }
}
