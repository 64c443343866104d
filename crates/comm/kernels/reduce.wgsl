// Reduces what ranks have put side by side: `ranks` inputs of `word_count` words each, `stride` words apart, behind the
// place for the result, which is as long. A word holds one element of 32 bits, two of 16 or four of 8; elements of 64 bits
// take two. Ranks are taken in order, and small floats are rounded once, so the result is the same on every device.

struct Scalars {
    word_count: u32,
    ranks: u32,
    stride: u32,
    // The type in the upper half, the reduction in the lower.
    code: u32,
}
var<immediate> scalars: Scalars;

@group(0) @binding(0) var<storage, read_write> words: array<u32>;

const F32 = 0u;
const F16 = 1u;
const BF16 = 2u;
const I64 = 3u;
const U64 = 4u;
const I32 = 5u;
const U32 = 6u;
const I16 = 7u;
const U16 = 8u;
const I8 = 9u;
const U8 = 10u;
const BOOL = 11u;

const SUM = 0u;
const PROD = 1u;
const MIN = 2u;
const MAX = 3u;
const AVG = 4u;
const AND = 5u;
const OR = 6u;
const XOR = 7u;

fn input(rank: u32, word: u32) -> u32 {
    return words[(rank + 1u) * scalars.stride + word];
}

fn is_nan(bits: u32) -> bool {
    return (bits & 0x7fffffffu) > 0x7f800000u;
}

fn from_f16(half: u32) -> f32 {
    let sign = (half & 0x8000u) << 16u;
    let exponent = (half >> 10u) & 31u;
    let fraction = half & 1023u;
    if exponent == 0u {
        return bitcast<f32>(sign | bitcast<u32>(f32(fraction) * bitcast<f32>(0x33800000u)));
    }
    if exponent == 31u {
        return bitcast<f32>(sign | 0x7f800000u | (fraction << 13u));
    }
    return bitcast<f32>(sign | ((exponent + 112u) << 23u) | (fraction << 13u));
}

fn to_f16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    if size > 0x7f800000u {
        return sign | 0x7e00u;
    }
    // From here on it rounds to infinity.
    if size >= 0x477ff000u {
        return sign | 0x7c00u;
    }
    // Below the least normal number, adding a half leaves as many bits as there are.
    if size < 0x38800000u {
        return sign | (bitcast<u32>(bitcast<f32>(size) + 0.5) - 0x3f000000u);
    }
    return sign | (((size + 0xfffu + ((size >> 13u) & 1u)) >> 13u) - 0x1c000u);
}

fn from_bf16(half: u32) -> f32 {
    return bitcast<f32>(half << 16u);
}

fn to_bf16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if is_nan(bits) {
        return ((bits >> 16u) & 0x8000u) | 0x7fc0u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn of_floats(op: u32, a: f32, b: f32) -> f32 {
    if op == PROD {
        return a * b;
    }
    if op == MIN || op == MAX {
        // A number counts more than none, and of equal ones the first.
        if is_nan(bitcast<u32>(b)) {
            return a;
        }
        let takes = is_nan(bitcast<u32>(a)) || select(b > a, b < a, op == MIN);
        return select(a, b, takes);
    }
    return a + b;
}

fn of_signed(op: u32, a: i32, b: i32) -> i32 {
    switch op {
        case PROD: { return a * b; }
        case MIN: { return min(a, b); }
        case MAX: { return max(a, b); }
        case AND: { return a & b; }
        case OR: { return a | b; }
        case XOR: { return a ^ b; }
        default: { return a + b; }
    }
}

fn of_unsigned(op: u32, a: u32, b: u32) -> u32 {
    switch op {
        case PROD: { return a * b; }
        case MIN: { return min(a, b); }
        case MAX: { return max(a, b); }
        case AND: { return a & b; }
        case OR: { return a | b; }
        case XOR: { return a ^ b; }
        default: { return a + b; }
    }
}

// `width` bits of a word from `shift` on, as a float of the type.
fn float_at(dtype: u32, word: u32, shift: u32) -> f32 {
    switch dtype {
        case F16: { return from_f16((word >> shift) & 0xffffu); }
        case BF16: { return from_bf16((word >> shift) & 0xffffu); }
        default: { return bitcast<f32>(word); }
    }
}

fn reduce_floats(dtype: u32, op: u32, word: u32, shift: u32) -> u32 {
    var value = float_at(dtype, input(0u, word), shift);
    for (var rank = 1u; rank < scalars.ranks; rank++) {
        value = of_floats(op, value, float_at(dtype, input(rank, word), shift));
    }
    if op == AVG {
        value = value / f32(scalars.ranks);
    }
    switch dtype {
        case F16: { return to_f16(value) << shift; }
        case BF16: { return to_bf16(value) << shift; }
        default: { return bitcast<u32>(value); }
    }
}

fn reduce_signed(op: u32, word: u32, shift: u32, width: u32) -> u32 {
    let rest = 32u - width;
    var value = bitcast<i32>(input(0u, word) << (rest - shift)) >> rest;
    for (var rank = 1u; rank < scalars.ranks; rank++) {
        value = of_signed(op, value, bitcast<i32>(input(rank, word) << (rest - shift)) >> rest);
    }
    if op == AVG {
        value = (bitcast<i32>(bitcast<u32>(value) << rest) >> rest) / i32(scalars.ranks);
    }
    return ((bitcast<u32>(value) << rest) >> rest) << shift;
}

fn truth(dtype: u32, value: u32) -> u32 {
    return select(value, select(0u, 1u, value != 0u), dtype == BOOL);
}

fn reduce_unsigned(dtype: u32, op: u32, word: u32, shift: u32, width: u32) -> u32 {
    let rest = 32u - width;
    var value = truth(dtype, (input(0u, word) << (rest - shift)) >> rest);
    for (var rank = 1u; rank < scalars.ranks; rank++) {
        value = of_unsigned(op, value, truth(dtype, (input(rank, word) << (rest - shift)) >> rest));
    }
    if op == AVG {
        value = ((value << rest) >> rest) / scalars.ranks;
    }
    return ((value << rest) >> rest) << shift;
}

// Whether the first of two elements of two words, the low one first, is less.
fn is_less(dtype: u32, a: vec2<u32>, b: vec2<u32>) -> bool {
    if a.y == b.y {
        return a.x < b.x;
    }
    return select(a.y < b.y, bitcast<i32>(a.y) < bitcast<i32>(b.y), dtype == I64);
}

fn reduce_long(dtype: u32, op: u32, word: u32) {
    var value = vec2<u32>(input(0u, word), input(0u, word + 1u));
    for (var rank = 1u; rank < scalars.ranks; rank++) {
        let other = vec2<u32>(input(rank, word), input(rank, word + 1u));
        switch op {
            case MIN: { value = select(value, other, is_less(dtype, other, value)); }
            case MAX: { value = select(value, other, is_less(dtype, value, other)); }
            case AND: { value = value & other; }
            case OR: { value = value | other; }
            case XOR: { value = value ^ other; }
            default: {
                let low = value.x + other.x;
                value = vec2<u32>(low, value.y + other.y + select(0u, 1u, low < other.x));
            }
        }
    }
    words[word] = value.x;
    words[word + 1u] = value.y;
}

fn reduce_word(dtype: u32, op: u32, word: u32) -> u32 {
    switch dtype {
        case F32: { return reduce_floats(dtype, op, word, 0u); }
        case F16, BF16: {
            return reduce_floats(dtype, op, word, 0u) | reduce_floats(dtype, op, word, 16u);
        }
        case I32: { return reduce_signed(op, word, 0u, 32u); }
        case I16: { return reduce_signed(op, word, 0u, 16u) | reduce_signed(op, word, 16u, 16u); }
        case I8: {
            return reduce_signed(op, word, 0u, 8u) | reduce_signed(op, word, 8u, 8u)
                | reduce_signed(op, word, 16u, 8u) | reduce_signed(op, word, 24u, 8u);
        }
        case U32: { return reduce_unsigned(dtype, op, word, 0u, 32u); }
        case U16: {
            return reduce_unsigned(dtype, op, word, 0u, 16u) | reduce_unsigned(dtype, op, word, 16u, 16u);
        }
        default: {
            return reduce_unsigned(dtype, op, word, 0u, 8u) | reduce_unsigned(dtype, op, word, 8u, 8u)
                | reduce_unsigned(dtype, op, word, 16u, 8u) | reduce_unsigned(dtype, op, word, 24u, 8u);
        }
    }
}

@compute @workgroup_size(256)
fn reduce(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let dtype = scalars.code >> 16u;
    let op = scalars.code & 0xffffu;
    for (var word = id.x; word < scalars.word_count; word += groups.x * 256u) {
        if dtype == I64 || dtype == U64 {
            if word % 2u == 0u {
                reduce_long(dtype, op, word);
            }
        } else {
            words[word] = reduce_word(dtype, op, word);
        }
    }
}
