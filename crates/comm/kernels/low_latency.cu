// Collectives of few bytes: every rank stores what it gives straight into the others' memory, in lines of 16 bytes that
// carry their number, and takes what has arrived in its own. No barrier between ranks, no atomic operation, and no fence
// where messages are short.
//
// Each block is a channel of its own. In each channel there is a ring of `SLOTS` slots from every rank to every other, in
// the receiver's memory; the messages of a ring are numbered, and the receiver stores how many it has taken into the
// sender's memory. Nothing else is assumed of other ranks, so that any order of calls goes by the same rings.
//
// A line is two words of 64 bits, each of which is stored at once and holds 32 bits of the message and the number.
// Messages of many bytes are stored bare, into slots of their own, and a flag with their number behind them, which costs
// a fence and halves what goes over the link. See docs/design/low-latency.md.

#include "elements.cuh"

enum { RANKS = 16, SLOTS = 4 };

// Of a reduction that is none: what arrives is put in its place.
enum { MOVES = 0xffff };

// Of one rank's part of the window, in bytes.
enum { ABORT = 0, CLAIM = 4, LIMIT = 8, CHANNELS = 4096, CHANNEL = 512, LINES = 65536, BARE_SLOTS = 16 << 20 };

// Of a channel, in words: the last number sent to each rank, that taken from each, and that taken by each; and of each
// slot and rank the number of the last bare message there.
enum { SENT = 0, TAKEN = 16, CREDIT = 32, FLAGS = 64 };

// Which messages of a call are bare: those that this rank gives, and those that it takes.
enum { GIVEN = 1, RECEIVED = 2 };

// Lines of bare messages that a thread has under way.
enum { BATCH = 4 };

// Of the words that the host sees.
enum { CAUSE = 0, PEER = 1, NUMBER = 2, AT = 3, ENDED = 16 };
enum { LATE = 1, BY_PEER = 2, BY_HOST = 3 };

// Numbers recur after 2^32 messages. Before that, whatever a slot holds is made a number that is far away.
enum { SWEEP = 1 << 24 };

struct Call {
    u64 part;
    // Bytes of a message, and from one to the next in the operands.
    u64 give_bytes, take_bytes;
    u64 give_stride, take_stride;
    // Where the operands begin.
    u64 give_at, take_at;
    // Of the type, for sums of multiples.
    u64 factor;
    unsigned rank, ranks;
    // Bits of the ranks: to whom this one gives, from whom it takes, itself included.
    unsigned receivers, senders;
    // The type in the upper half, the reduction in the lower.
    unsigned code;
    // Lines of a slot, and of one of bare messages.
    unsigned lines, bare_lines;
    // Channels that share the messages.
    unsigned give_channels, take_channels;
    // Bytes that all places and lengths of operands are multiples of: 1, 2, 4 or 8.
    unsigned unit;
    // Whether ranks reduce a part each and then give it to all.
    unsigned two_shots;
    // Which messages are bare.
    unsigned bare;
};

struct Numbers {
    unsigned sent[RANKS], taken[RANKS];
};

static __device__ unsigned load_word(const void *from) {
    unsigned value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// What was stored before the flag was is seen behind it.
static __device__ unsigned load_flag(const void *from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

static __device__ void store_word(void *to, unsigned value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

static __device__ void load_line(const u64 *from, u64 &low, u64 &high) {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

static __device__ u64 load_bare(const u64 *from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

static __device__ void store_line(u64 *to, unsigned number, u64 value) {
    u64 stamp = (u64)number << 32, low = stamp | (unsigned)value, high = stamp | value >> 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

// What was stored before is seen by whoever sees what is stored behind it.
static __device__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

static __device__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// How long a thread has been waiting, and whether it has given up.
struct Patience {
    u64 began, asked;
    bool is_over;
};

// Tells the host why it ends, once, and the other ranks that nothing more comes.
inline __noinline__ __device__ void give_up(unsigned char *window, unsigned *host, u64 part, unsigned rank,
                                            unsigned ranks, unsigned cause, unsigned peer, unsigned number) {
    if (atomicExch((unsigned *)(window + part * rank + CLAIM), 1) != 0)
        return;
    store_word(host + PEER, peer);
    store_word(host + NUMBER, number);
    store_word(host + AT, blockIdx.x);
    __threadfence_system();
    store_word(host + CAUSE, cause);
    // Who gave up first has told all.
    for (unsigned other = 0; cause != BY_PEER && other < ranks; other++)
        store_word(window + part * other + ABORT, rank + 1);
}

// Looked at now and then by whoever waits: why it is over, or 0.
inline __noinline__ __device__ unsigned cause_to_end(const unsigned char *own, const unsigned *host, Patience &patience) {
    if (load_word(own + ABORT))
        return BY_PEER;
    u64 now = now_ns();
    if (patience.began == 0)
        patience.began = patience.asked = now;
    // The host's memory is far away.
    if (now - patience.asked > 1000000) {
        patience.asked = now;
        if (load_word(host + ENDED))
            return BY_HOST;
    }
    return now - patience.began > *(const volatile u64 *)(own + LIMIT) ? LATE : 0;
}

// Eight bytes, or what is left of them, at a place that is a multiple of `unit`.
inline __noinline__ __device__ u64 load_pieces(const unsigned char *from, u64 left, unsigned unit) {
    u64 value = 0;
#pragma unroll 1
    for (unsigned byte = 0; byte < 8 && byte < left; byte += unit) {
        u64 piece = unit == 4 ? *(const unsigned *)(from + byte)
                    : unit == 2 ? *(const unsigned short *)(from + byte)
                                : from[byte];
        value |= piece << (byte * 8);
    }
    return value;
}

inline __noinline__ __device__ void store_pieces(unsigned char *to, u64 left, unsigned unit, u64 value) {
#pragma unroll 1
    for (unsigned byte = 0; byte < 8 && byte < left; byte += unit, value >>= unit * 8) {
        if (unit == 4)
            *(unsigned *)(to + byte) = (unsigned)value;
        else if (unit == 2)
            *(unsigned short *)(to + byte) = (unsigned short)value;
        else
            to[byte] = (unsigned char)value;
    }
}

// Eight bytes of the usual sums, in registers.
static __device__ void add_usual(unsigned type, bool is_first, float (&sums)[4], u64 word) {
#pragma unroll
    for (unsigned lane = 0; lane < 4; lane++) {
        unsigned half = (unsigned)(word >> (lane * 16)) & 0xffff, bits = lane < 2 ? (unsigned)(word >> (lane * 32 & 63)) : 0;
        float value = type == F32 ? __uint_as_float(bits) : type == F16 ? from_f16(half) : __uint_as_float(half << 16);
        sums[lane] = is_first ? value : sums[lane] + value;
    }
}

static __device__ u64 usual_sum(unsigned type, const float (&sums)[4]) {
    if (type == F32)
        return __float_as_uint(sums[0]) | (u64)__float_as_uint(sums[1]) << 32;
    u64 word = 0;
#pragma unroll
    for (unsigned lane = 0; lane < 4; lane++)
        word |= (u64)(type == F16 ? to_f16(sums[lane]) : to_bf16(sums[lane])) << (lane * 16);
    return word;
}

// Consecutive lines of a message, or of as many parts of one as there are ranks: part `r` begins `spread * r` lines later.
struct Lines {
    u64 first, end, spread;
    // Of each part, at most.
    unsigned count;

    __device__ u64 at(unsigned rank, unsigned index) const { return first + spread * rank + index; }
};

// `BARE` where messages may be bare; what they take stays out of the way of those that are short.
template <bool BARE>
struct Channel {
    unsigned char *window;
    unsigned *host;
    const unsigned char *src;
    unsigned char *dst;
    const Call &call;
    Numbers &numbers;
    Patience patience;
    unsigned spins;

    __device__ unsigned char *part(unsigned rank) const { return window + call.part * rank; }

    __device__ unsigned *words(unsigned rank) const {
        return (unsigned *)(part(rank) + CHANNELS + blockIdx.x * CHANNEL);
    }

    // Which of the slots is that of a message from one rank to another.
    __device__ u64 place(unsigned from, unsigned number) const {
        return ((u64)blockIdx.x * SLOTS + number % SLOTS) * call.ranks + from;
    }

    // The first line of a slot from one rank to another.
    __device__ u64 *slot(unsigned from, unsigned to, unsigned number) const {
        return (u64 *)(part(to) + LINES) + place(from, number) * call.lines * 2;
    }

    // The same of a bare message.
    __device__ u64 *bare_slot(unsigned from, unsigned to, unsigned number) const {
        return (u64 *)(part(to) + BARE_SLOTS) + place(from, number) * call.bare_lines;
    }

    __device__ unsigned *flag(unsigned from, unsigned to, unsigned number) const {
        return words(to) + FLAGS + number % SLOTS * RANKS + from;
    }

    __device__ bool gives_bare() const { return BARE && call.bare & GIVEN; }
    __device__ bool takes_bare() const { return BARE && call.bare & RECEIVED; }

    __device__ bool gives_to(unsigned rank) const { return rank != call.rank && call.receivers >> rank & 1; }
    __device__ bool takes_from(unsigned rank) const { return rank != call.rank && call.senders >> rank & 1; }

    __device__ void end(unsigned cause, unsigned peer, unsigned number) {
        patience.is_over = true;
        give_up(window, host, call.part, call.rank, call.ranks, cause, peer, number);
    }

    __device__ bool is_over(unsigned peer, unsigned number) {
        if (++spins % 64 != 0)
            return false;
        unsigned cause = cause_to_end(part(call.rank), host, patience);
        if (cause == BY_PEER)
            peer = load_word(part(call.rank) + ABORT) - 1;
        if (cause != 0)
            end(cause, peer, number);
        return cause != 0;
    }

    // Until the slots of the next messages are free, by the threads whose numbers are ranks.
    __device__ void wait_for_room(unsigned sent, unsigned credit) {
        unsigned peer = threadIdx.x, last = sent + (call.two_shots ? 2 : 1);
        while ((int)(credit + SLOTS - last) < 0 && !is_over(peer, last))
            credit = load_word(words(call.rank) + CREDIT + peer);
    }

    // Whether there is something to do at all. What a call needs first is loaded at once.
    __device__ bool begin() {
        unsigned peer = threadIdx.x;
        if (peer < call.ranks) {
            unsigned *own = words(call.rank);
            unsigned sent = own[SENT + peer], taken = own[TAKEN + peer], credit = load_word(own + CREDIT + peer);
            unsigned by = load_word(part(call.rank) + ABORT);
            numbers.sent[peer] = sent;
            numbers.taken[peer] = taken;
            if (by != 0)
                end(BY_PEER, by - 1, sent);
            else if (gives_to(peer))
                wait_for_room(sent, credit);
        }
        return !__syncthreads_or(patience.is_over);
    }

    // So many messages have been given to and taken from each. Whether it goes on.
    __device__ bool turn(unsigned given, unsigned taken, bool is_last) {
        unsigned peer = threadIdx.x;
        bool sweeps = peer < call.ranks && taken && takes_from(peer) && (numbers.taken[peer] + taken) % SWEEP <= SLOTS;
        if (__syncthreads_or(patience.is_over || sweeps)) {
            if (__syncthreads_or(patience.is_over))
                return false;
            sweep(taken);
        }
        if (peer < call.ranks) {
            unsigned *own = words(call.rank);
            if (taken && takes_from(peer)) {
                numbers.taken[peer] += taken;
                store_word(words(peer) + CREDIT + call.rank, numbers.taken[peer]);
            }
            if (given && gives_to(peer))
                numbers.sent[peer] += given;
            if (is_last) {
                own[SENT + peer] = numbers.sent[peer];
                own[TAKEN + peer] = numbers.taken[peer];
            } else if (gives_to(peer)) {
                wait_for_room(numbers.sent[peer], load_word(own + CREDIT + peer));
            }
        }
        return is_last || !__syncthreads_or(patience.is_over);
    }

    // What a slot holds is made a number that is far away, before its sender is told that it is free. Once in a long while.
    __device__ void sweep(unsigned taken) const {
#pragma unroll 1
        for (unsigned peer = 0; peer < call.ranks; peer++) {
            for (unsigned ahead = 1; takes_from(peer) && ahead <= taken; ahead++) {
                unsigned number = numbers.taken[peer] + ahead;
                u64 *lines = slot(peer, call.rank, number);
                for (unsigned line = threadIdx.x; number % SWEEP < SLOTS && line < call.lines; line += blockDim.x)
                    store_line(lines + line * 2, number ^ 0x80000000u, 0);
                if (threadIdx.x == 0 && number % SWEEP < SLOTS)
                    *flag(peer, call.rank, number) = number ^ 0x80000000u;
            }
        }
        __threadfence_system();
        __syncthreads();
    }

    // A line of what this rank gives to another; behind its end there is nothing.
    __device__ u64 given(unsigned to, u64 line) const {
        const unsigned char *from = src + call.give_at + call.give_stride * to + line * 8;
        u64 value = call.unit == 8 ? *(const u64 *)from : load_pieces(from, call.give_bytes - line * 8, call.unit);
        return (call.code & 0xffff) == PREMUL ? scaled(call.code >> 16, value, call.factor) : value;
    }

    __noinline__ __device__ u64 given_by_pieces(unsigned to, u64 line) const { return given(to, line); }

    __device__ void take(unsigned from, u64 line, u64 value) const {
        unsigned char *to = dst + call.take_at + call.take_stride * from + line * 8;
        if (call.unit == 8)
            *(u64 *)to = value;
        else
            store_pieces(to, call.take_bytes - line * 8, call.unit, value);
    }

    __device__ void push(unsigned peer, unsigned ahead, unsigned index, u64 value) const {
        unsigned number = numbers.sent[peer] + ahead;
        if (gives_bare())
            bare_slot(call.rank, peer, number)[index] = value;
        else
            store_line(slot(call.rank, peer, number) + (u64)index * 2, number, value);
    }

    // All threads have stored what bare messages hold: their receivers are told.
    __device__ void raise_flags(unsigned ahead) const {
        __syncthreads();
        unsigned peer = threadIdx.x;
        if (peer < call.ranks && gives_to(peer)) {
            unsigned number = numbers.sent[peer] + ahead;
            fence();
            store_word(flag(call.rank, peer, number), number);
        }
    }

    // Until bare messages have arrived from all. Whether they have.
    __device__ bool flags_are_up(unsigned ahead) {
        unsigned peer = threadIdx.x;
        if (peer < call.ranks && takes_from(peer)) {
            unsigned number = numbers.taken[peer] + ahead;
            while (load_flag(flag(peer, call.rank, number)) != number && !is_over(peer, number)) {
            }
        }
        return !__syncthreads_or(patience.is_over);
    }

    // The lines `index` of what comes from up to four of `senders`, from rank `base` on, all loads under way at once.
    __device__ bool arrived(unsigned base, unsigned senders, unsigned ahead, unsigned index, u64 (&values)[4]) {
        unsigned missing = senders >> base & 15;
        while (missing) {
            u64 low[4], high[4];
#pragma unroll
            for (unsigned rank = 0; rank < 4; rank++) {
                if (missing >> rank & 1) {
                    u64 *lines = slot(base + rank, call.rank, numbers.taken[base + rank] + ahead);
                    load_line(lines + (u64)index * 2, low[rank], high[rank]);
                }
            }
#pragma unroll
            for (unsigned rank = 0; rank < 4; rank++) {
                if (missing >> rank & 1) {
                    unsigned number = numbers.taken[base + rank] + ahead;
                    if (low[rank] >> 32 == number && high[rank] >> 32 == number) {
                        values[rank] = (unsigned)low[rank] | high[rank] << 32;
                        missing &= ~(1u << rank);
                    }
                }
            }
            unsigned first = base + __ffs(missing) - 1;
            if (missing && is_over(first, numbers.taken[first] + ahead))
                return false;
        }
        return true;
    }

    // Gives lines of messages to all who receive some, the nearest first.
    __device__ void give(Lines lines) const {
        bool same = call.give_stride == 0 && lines.spread == 0;
        for (unsigned index = threadIdx.x; index < lines.count; index += blockDim.x) {
            u64 value = same ? given(0, lines.first + index) : 0;
#pragma unroll 1
            for (unsigned step = 1; step < call.ranks; step++) {
                unsigned peer = (call.rank + step) % call.ranks;
                if (!gives_to(peer) || lines.at(peer, index) >= lines.end)
                    continue;
                if (!same)
                    value = given(peer, lines.at(peer, index));
                push(peer, 1, index, value);
            }
        }
    }

    // Lines of what this rank gives to another, a block's width apart and all loads under way at once.
    __device__ void load_given(unsigned to, const Lines &lines, unsigned first, u64 (&values)[BATCH]) const {
        bool is_plain = call.unit == 8 && (call.code & 0xffff) != PREMUL;
        const u64 *from = (const u64 *)(src + call.give_at + call.give_stride * to);
#pragma unroll
        for (unsigned turn = 0; turn < BATCH; turn++) {
            unsigned index = first + turn * blockDim.x;
            u64 line = lines.at(to, index);
            bool is_there = index < lines.count && line < lines.end;
            values[turn] = !is_there ? 0 : is_plain ? from[line] : given_by_pieces(to, line);
        }
    }

    // The same of what arrived bare.
    __device__ void load_arrived(unsigned from, unsigned ahead, const Lines &lines, unsigned part, unsigned first,
                                 u64 (&values)[BATCH]) const {
        const u64 *slot = bare_slot(from, call.rank, numbers.taken[from] + ahead);
#pragma unroll
        for (unsigned turn = 0; turn < BATCH; turn++) {
            unsigned index = first + turn * blockDim.x;
            bool is_there = index < lines.count && lines.at(part, index) < lines.end;
            values[turn] = is_there ? load_bare(slot + index) : 0;
        }
    }

    __device__ void give_bare(Lines lines) const {
        bool same = call.give_stride == 0 && lines.spread == 0;
        for (unsigned first = threadIdx.x; first < lines.count; first += BATCH * blockDim.x) {
            u64 values[BATCH];
            if (same)
                load_given(0, lines, first, values);
#pragma unroll 1
            for (unsigned step = 1; step < call.ranks; step++) {
                unsigned peer = (call.rank + step) % call.ranks;
                if (!gives_to(peer))
                    continue;
                if (!same)
                    load_given(peer, lines, first, values);
#pragma unroll
                for (unsigned turn = 0; turn < BATCH; turn++) {
                    unsigned index = first + turn * blockDim.x;
                    if (index < lines.count && lines.at(peer, index) < lines.end)
                        push(peer, 1, index, values[turn]);
                }
            }
        }
        raise_flags(1);
    }

    __device__ void take_moved_bare(Lines lines, unsigned ahead) {
        for (unsigned first = threadIdx.x; first < lines.count; first += BATCH * blockDim.x) {
#pragma unroll 1
            for (unsigned peer = 0; peer < call.ranks; peer++) {
                if (!takes_from(peer))
                    continue;
                u64 values[BATCH];
                load_arrived(peer, ahead, lines, peer, first, values);
#pragma unroll
                for (unsigned turn = 0; turn < BATCH; turn++) {
                    unsigned index = first + turn * blockDim.x;
                    if (index < lines.count && lines.at(peer, index) < lines.end)
                        take(peer, lines.at(peer, index), values[turn]);
                }
            }
        }
    }

    // Of the usual sums; a thread has several lines under way.
    __device__ void take_summed_bare(Lines lines) {
        unsigned type = call.code >> 16;
        for (unsigned first = threadIdx.x; first < lines.count; first += BATCH * blockDim.x) {
            float sums[BATCH][4];
            u64 own[BATCH];
            load_given(call.rank, lines, first, own);
#pragma unroll 1
            for (unsigned rank = 0; rank < call.ranks; rank++) {
                u64 values[BATCH];
                if (rank != call.rank)
                    load_arrived(rank, 1, lines, call.rank, first, values);
#pragma unroll
                for (unsigned turn = 0; turn < BATCH; turn++)
                    add_usual(type, rank == 0, sums[turn], rank == call.rank ? own[turn] : values[turn]);
            }
#pragma unroll
            for (unsigned turn = 0; turn < BATCH; turn++) {
                unsigned index = first + turn * blockDim.x;
                if (index < lines.count && lines.at(call.rank, index) < lines.end)
                    put_reduced(lines, index, usual_sum(type, sums[turn]));
            }
        }
    }

    // Of everything else.
    __device__ void take_reduced_bare(Lines lines) {
        for (unsigned index = threadIdx.x; index < lines.count && lines.at(call.rank, index) < lines.end;
             index += blockDim.x) {
            u64 words[RANKS];
#pragma unroll 1
            for (unsigned rank = 0; rank < call.ranks; rank++)
                words[rank] = rank == call.rank
                                  ? given(rank, lines.at(rank, index))
                                  : load_bare(bare_slot(rank, call.rank, numbers.taken[rank] + 1) + index);
            put_reduced(lines, index, reduced(call.code >> 16, call.code & 0xffff, call.ranks, words));
        }
    }

    // Puts what arrived from each in its place.
    __device__ void take_moved(Lines lines, unsigned ahead) {
        unsigned others = call.senders & ~(1u << call.rank);
        for (unsigned index = threadIdx.x; index < lines.count; index += blockDim.x) {
            for (unsigned base = 0; base < call.ranks; base += 4) {
                unsigned senders = 0;
#pragma unroll
                for (unsigned rank = 0; rank < 4; rank++)
                    if (others >> (base + rank) & 1 && lines.at(base + rank, index) < lines.end)
                        senders |= 1u << (base + rank);
                u64 values[4];
                if (!arrived(base, senders, ahead, index, values))
                    return;
#pragma unroll
                for (unsigned rank = 0; rank < 4; rank++)
                    if (senders >> (base + rank) & 1)
                        take(base + rank, lines.at(base + rank, index), values[rank]);
            }
        }
    }

    // The same of this rank's own.
    __device__ void take_own(Lines lines) const {
        for (unsigned index = threadIdx.x; index < lines.count; index += blockDim.x)
            take(call.rank, lines.first + index, given(call.rank, lines.first + index));
    }

    __device__ bool is_usual() const {
        unsigned type = call.code >> 16;
        return (type == F32 || type == F16 || type == BF16) && (call.code & 0xffff) == SUM;
    }

    // Takes what a line of all ranks reduces to, in their order, and gives it to all if that is another shot.
    __device__ void take_reduced(Lines lines) {
        unsigned others = call.senders & ~(1u << call.rank), type = call.code >> 16, op = call.code & 0xffff;
        bool is_usual = this->is_usual();
        for (unsigned index = threadIdx.x; index < lines.count && lines.at(call.rank, index) < lines.end;
             index += blockDim.x) {
            u64 own = given(call.rank, lines.at(call.rank, index)), words[RANKS], result;
            float sums[4];
            for (unsigned base = 0; base < call.ranks; base += 4) {
                u64 values[4];
                if (!arrived(base, others, 1, index, values))
                    return;
#pragma unroll
                for (unsigned rank = 0; rank < 4; rank++) {
                    if (base + rank >= call.ranks)
                        continue;
                    u64 value = base + rank == call.rank ? own : values[rank];
                    if (is_usual)
                        add_usual(type, base + rank == 0, sums, value);
                    else
                        words[base + rank] = value;
                }
            }
            result = is_usual ? usual_sum(type, sums) : reduced(type, op, call.ranks, words);
            put_reduced(lines, index, result);
        }
    }

    // What a line of all ranks reduces to, for this rank, and for all if that is another shot.
    __device__ void put_reduced(const Lines &lines, unsigned index, u64 result) const {
        take(0, lines.at(call.rank, index), result);
        if (!call.two_shots)
            return;
#pragma unroll 1
        for (unsigned step = 1; step < call.ranks; step++)
            push((call.rank + step) % call.ranks, 2, index, result);
    }

    // This channel's part of a message.
    static __device__ Lines share(u64 bytes, unsigned channels) {
        u64 all = (bytes + 7) / 8, each = channels ? (all + channels - 1) / channels : 0;
        u64 first = min(all, each * blockIdx.x);
        return {first, blockIdx.x < channels ? min(all, first + each) : first, 0, 0};
    }

    // The next lines that slots hold, which are taken from `all`.
    __device__ Lines next(Lines &all, bool bare) const {
        Lines lines = all;
        u64 left = all.end - all.first, room = bare ? call.bare_lines : call.lines;
        if (call.two_shots)
            lines.spread = (min(left, room * call.ranks) + call.ranks - 1) / call.ranks;
        lines.count = (unsigned)(call.two_shots ? lines.spread : min(left, room));
        all.first = min(all.end, all.first + (call.two_shots ? lines.spread * call.ranks : lines.count));
        lines.end = all.first;
        return lines;
    }

    // One round of messages that this rank takes.
    __device__ void receive(Lines lines, bool moves) {
        if (!moves)
            take_reduced(lines);
        if (moves || call.two_shots)
            take_moved(lines, call.two_shots ? 2 : 1);
    }

    __device__ void receive_bare(Lines lines, bool moves) {
        if (!flags_are_up(1))
            return;
        if (moves)
            return take_moved_bare(lines, 1);
        if (is_usual())
            take_summed_bare(lines);
        else
            take_reduced_bare(lines);
        if (!call.two_shots)
            return;
        raise_flags(2);
        if (flags_are_up(2))
            take_moved_bare(lines, 2);
    }

    __device__ void run() {
        if (!begin())
            return;
        Lines give_all = share(call.give_bytes, call.give_channels);
        Lines take_all = share(call.take_bytes, call.take_channels);
        bool moves = (call.code & 0xffff) == MOVES;
        bool has_own = moves && (call.senders & call.receivers) >> call.rank & 1;
        bool goes_on = give_all.first < give_all.end || take_all.first < take_all.end;
        while (goes_on) {
            Lines gives = next(give_all, gives_bare()), takes = next(take_all, takes_bare());
            if (!gives_bare())
                give(gives);
            else if (gives.count)
                give_bare(gives);
            if (has_own)
                take_own(takes);
            if (!takes_bare())
                receive(takes, moves);
            else if (takes.count)
                receive_bare(takes, moves);
            goes_on = give_all.first < give_all.end || take_all.first < take_all.end;
            unsigned shots = call.two_shots ? 2 : 1;
            goes_on = turn(gives.count ? shots : 0, takes.count ? shots : 0, !goes_on) && goes_on;
        }
    }
};

// Operands that share no bytes.
extern "C" __global__ void __launch_bounds__(512)
low_latency(unsigned char *window, unsigned *host, const unsigned char *src, unsigned char *dst, Call call) {
    __shared__ Numbers numbers;
    Channel<false>{window, host, src, dst, call, numbers, {0, 0, false}, 0}.run();
}

// One operand, or two in one range.
extern "C" __global__ void __launch_bounds__(512)
low_latency_within(unsigned char *window, unsigned *host, unsigned char *both, Call call) {
    __shared__ Numbers numbers;
    Channel<false>{window, host, both, both, call, numbers, {0, 0, false}, 0}.run();
}

// Both of the following, once.
static __noinline__ __device__ void run_bare(unsigned char *window, unsigned *host, const unsigned char *src,
                                             unsigned char *dst, const Call &call, Numbers &numbers) {
    Channel<true>{window, host, src, dst, call, numbers, {0, 0, false}, 0}.run();
}

// The same where messages are bare.
extern "C" __global__ void __launch_bounds__(512)
low_latency_bare(unsigned char *window, unsigned *host, const unsigned char *src, unsigned char *dst, Call call) {
    __shared__ Numbers numbers;
    run_bare(window, host, src, dst, call, numbers);
}

extern "C" __global__ void __launch_bounds__(512)
low_latency_bare_within(unsigned char *window, unsigned *host, unsigned char *both, Call call) {
    __shared__ Numbers numbers;
    run_bare(window, host, both, both, call, numbers);
}
