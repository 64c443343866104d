// Elements of every type, and what two of them reduce to, for all kernels that reduce. Integers wrap; types of 8 and 16
// bits of floating point are computed in 32 and rounded by whoever has all of them; of a number and none the number
// counts in minima and maxima, and of equal ones the first.

enum Type { F32, F16, BF16, I64, U64, I32, U32, I16, U16, I8, U8, BOOL, F64, E4M3, E5M2 };
enum Reduction { SUM, PROD, MIN, MAX, AVG, AND, OR, XOR, PREMUL };

static __device__ bool is_nan(float value) {
    return (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u;
}

static __device__ bool is_nan(double value) {
    return value != value;
}

static __device__ float from_f16(unsigned half) {
    unsigned sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 0)
        return __uint_as_float(sign | __float_as_uint((float)fraction * __uint_as_float(0x33800000u)));
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    return __uint_as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
}

static __device__ unsigned to_f16(float value) {
    unsigned bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u)
        return sign | 0x7e00u;
    // From here on it rounds to infinity.
    if (size >= 0x477ff000u)
        return sign | 0x7c00u;
    // Below the least normal number, adding a half leaves as many bits as there are.
    if (size < 0x38800000u)
        return sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u);
    return sign | (((size + 0xfff + ((size >> 13) & 1)) >> 13) - 0x1c000u);
}

static __device__ unsigned to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    if (is_nan(value))
        return ((bits >> 16) & 0x8000u) | 0x7fc0u;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static __device__ float from_e4m3(unsigned byte) {
    unsigned sign = (byte & 0x80u) << 24, exponent = (byte >> 3) & 15, fraction = byte & 7;
    if ((byte & 0x7f) == 0x7f)
        return __uint_as_float(sign | 0x7fc00000u);
    if (exponent == 0)
        return __uint_as_float(sign | __float_as_uint((float)fraction * __uint_as_float(0x3b000000u)));
    return __uint_as_float(sign | ((exponent + 120) << 23) | (fraction << 20));
}

// What is too large becomes the largest number there is.
static __device__ unsigned to_e4m3(float value) {
    unsigned bits = __float_as_uint(value), sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u)
        return sign | 0x7fu;
    if (size >= 0x43e00000u)
        return sign | 0x7eu;
    if (size < 0x3c800000u)
        return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u);
    unsigned rounded = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - 0x3c0u;
    return sign | (rounded < 0x7e ? rounded : 0x7e);
}

static __device__ float from_e5m2(unsigned byte) {
    return from_f16(byte << 8);
}

static __device__ unsigned to_e5m2(float value) {
    unsigned bits = __float_as_uint(value), sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u)
        return sign | 0x7fu;
    if (size >= 0x47600000u)
        return sign | 0x7bu;
    if (size < 0x38800000u)
        return sign | (__float_as_uint(__uint_as_float(size) + 128.0f) - 0x43000000u);
    unsigned rounded = ((size + 0xfffff + ((size >> 21) & 1)) >> 21) - 0x1c0u;
    return sign | (rounded < 0x7b ? rounded : 0x7b);
}

template <typename T> static __device__ T of_floats(unsigned op, T a, T b) {
    switch (op) {
    case PROD: return a * b;
    // A number counts more than none, and of equal ones the first.
    case MIN: return is_nan(b) ? a : is_nan(a) || b < a ? b : a;
    case MAX: return is_nan(b) ? a : is_nan(a) || b > a ? b : a;
    default: return a + b;
    }
}

template <typename T> static __device__ T of_integers(unsigned op, T a, T b) {
    switch (op) {
    case PROD: return (T)((unsigned long long)a * (unsigned long long)b);
    case MIN: return a < b ? a : b;
    case MAX: return a > b ? a : b;
    case AND: return a & b;
    case OR: return a | b;
    case XOR: return a ^ b;
    default: return (T)((unsigned long long)a + (unsigned long long)b);
    }
}

// Eight bytes of elements: the least that is a whole number of each type's. What is called is not inlined, since there is
// much of it, and the usual sums do without.

typedef unsigned long long u64;

static __device__ unsigned width_of(unsigned type) {
    switch (type) {
    case F64:
    case I64:
    case U64: return 64;
    case F32:
    case I32:
    case U32: return 32;
    case F16:
    case BF16:
    case I16:
    case U16: return 16;
    default: return 8;
    }
}

static __device__ bool is_small_float(unsigned type) {
    return type == F32 || type == F16 || type == BF16 || type == E4M3 || type == E5M2;
}

static __device__ float decode(unsigned type, unsigned bits) {
    switch (type) {
    case F16: return from_f16(bits);
    case BF16: return __uint_as_float(bits << 16);
    case E4M3: return from_e4m3(bits);
    case E5M2: return from_e5m2(bits);
    default: return __uint_as_float(bits);
    }
}

static __device__ unsigned encode(unsigned type, float value) {
    switch (type) {
    case F16: return to_f16(value);
    case BF16: return to_bf16(value);
    case E4M3: return to_e4m3(value);
    case E5M2: return to_e5m2(value);
    default: return __float_as_uint(value);
    }
}

// The element at a bit.
static __device__ u64 element(u64 word, unsigned bit, unsigned width) {
    return word >> bit & ~0ull >> (64 - width);
}

// One element of all ranks.
struct Elements {
    const u64 *words;
    unsigned ranks, bit, width;

    __device__ u64 at(unsigned rank) const { return element(words[rank], bit, width); }
};

static __device__ u64 reduced_float(unsigned type, unsigned op, Elements in) {
    float value = decode(type, (unsigned)in.at(0));
#pragma unroll 1
    for (unsigned rank = 1; rank < in.ranks; rank++)
        value = of_floats(op, value, decode(type, (unsigned)in.at(rank)));
    return encode(type, op == AVG ? value / (float)in.ranks : value);
}

static __device__ u64 reduced_double(unsigned op, Elements in) {
    double value = __longlong_as_double(in.at(0));
#pragma unroll 1
    for (unsigned rank = 1; rank < in.ranks; rank++)
        value = of_floats(op, value, __longlong_as_double(in.at(rank)));
    return __double_as_longlong(op == AVG ? value / (double)in.ranks : value);
}

// Integers are extended by what the type extends with, and cut off where they are wider than it.
template <typename T> static __device__ u64 reduced_integer(unsigned op, Elements in) {
    unsigned rest = 64 - in.width;
    T value = (T)(in.at(0) << rest) >> rest;
#pragma unroll 1
    for (unsigned rank = 1; rank < in.ranks; rank++)
        value = of_integers<T>(op, value, (T)(in.at(rank) << rest) >> rest);
    return op == AVG ? ((T)((u64)value << rest) >> rest) / (T)in.ranks : value;
}

static __device__ u64 reduced_truth(unsigned op, Elements in) {
    u64 value = in.at(0) != 0;
#pragma unroll 1
    for (unsigned rank = 1; rank < in.ranks; rank++)
        value = of_integers<u64>(op, value, in.at(rank) != 0);
    return value;
}

// What eight bytes of all ranks reduce to, in the order of the ranks.
inline __noinline__ __device__ u64 reduced(unsigned type, unsigned op, unsigned ranks, const u64 *words) {
    u64 result = 0;
    unsigned width = width_of(type);
    bool is_signed = type == I64 || type == I32 || type == I16 || type == I8;
#pragma unroll 1
    for (unsigned bit = 0; bit < 64; bit += width) {
        Elements in = {words, ranks, bit, width};
        u64 one = is_small_float(type) ? reduced_float(type, op, in)
                  : type == F64        ? reduced_double(op, in)
                  : type == BOOL       ? reduced_truth(op, in)
                  : is_signed          ? reduced_integer<long long>(op, in)
                                       : reduced_integer<u64>(op, in);
        result |= element(one, 0, width) << bit;
    }
    return result;
}

// Times a factor of the same type, rounded: the same whether it is sent or used here, which a fused product and sum is
// not.
inline __noinline__ __device__ u64 scaled(unsigned type, u64 word, u64 factor) {
    u64 result = 0;
    unsigned width = width_of(type);
#pragma unroll 1
    for (unsigned bit = 0; bit < 64; bit += width) {
        u64 one = element(word, bit, width);
        if (is_small_float(type))
            one = encode(type, __fmul_rn(decode(type, (unsigned)one), decode(type, (unsigned)factor)));
        else if (type == F64)
            one = __double_as_longlong(__dmul_rn(__longlong_as_double(one), __longlong_as_double(factor)));
        else
            one *= factor;
        result |= element(one, 0, width) << bit;
    }
    return result;
}
