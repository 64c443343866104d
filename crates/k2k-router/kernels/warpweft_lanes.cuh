// Lanes for kernels: one producer or several send messages, one consumer reads them, on one device or on two.
//
// The same ring as in src/ring.rs, on memory that the host lays out. For CUDA it is compiled by NVRTC; for the CPU it is
// C++17, which is how its tests run it under a thread sanitizer and beside the ring in Rust.
//
// A lane is three pieces of memory: lines of 16 bytes where the consumer polls, the credit where the producers are, and,
// if there are several producers, the tickets that they share. All begin as zeros.
#pragma once

#ifdef __CUDACC__
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif
#define WARPWEFT_FN __device__ inline
#else
#include <atomic>
#include <cstdint>
#include <cstring>
#define WARPWEFT_FN inline
#endif

#ifndef WARPWEFT_WIRE_INCLUDED
#define WARPWEFT_WIRE_INCLUDED
#include "warpweft_wire.h"
#endif

// 12 bytes and a stamp.
struct warpweft_words {
    uint32_t w[4];
};

#ifdef __CUDACC__

struct alignas(16) warpweft_line {
    uint32_t w[4];
};
typedef uint64_t warpweft_counter;

// One access of 16 bytes carries a line and its stamp, so that it needs no order with others. PTX promises that of a vector
// word by word only: that a line arrives whole has to be shown on the device first. System scope, since the other end may
// be another device.
WARPWEFT_FN void warpweft_store(warpweft_line *line, warpweft_words v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(line), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
}
WARPWEFT_FN warpweft_words warpweft_load(const warpweft_line *line) {
    warpweft_words v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(line)
                 : "memory");
    return v;
}
WARPWEFT_FN void warpweft_give(warpweft_counter *credit, uint64_t value) {
    // Everything that was given back has been read: its stamps were looked at.
    asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(credit), "l"(value) : "memory");
}
WARPWEFT_FN uint64_t warpweft_look(const warpweft_counter *counter) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
}
WARPWEFT_FN bool warpweft_draw(warpweft_counter *tail, uint64_t *expected, uint64_t wanted) {
    uint64_t before = atomicCAS((unsigned long long *)tail, *expected, wanted);
    bool drawn = before == *expected;
    *expected = before;
    return drawn;
}

#else

struct alignas(16) warpweft_line {
    std::atomic<uint64_t> low, high;
};
typedef std::atomic<uint64_t> warpweft_counter;

// In halves, of which the one with the stamp publishes the other.
WARPWEFT_FN void warpweft_store(warpweft_line *line, warpweft_words v) {
    line->low.store(v.w[0] | (uint64_t)v.w[1] << 32, std::memory_order_relaxed);
    line->high.store(v.w[2] | (uint64_t)v.w[3] << 32, std::memory_order_release);
}
WARPWEFT_FN warpweft_words warpweft_load(const warpweft_line *line) {
    uint64_t high = line->high.load(std::memory_order_acquire);
    uint64_t low = line->low.load(std::memory_order_relaxed);
    return {{(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)}};
}
WARPWEFT_FN void warpweft_give(warpweft_counter *credit, uint64_t value) {
    credit->store(value, std::memory_order_release);
}
WARPWEFT_FN uint64_t warpweft_look(const warpweft_counter *counter) {
    return counter->load(std::memory_order_acquire);
}
WARPWEFT_FN bool warpweft_draw(warpweft_counter *tail, uint64_t *expected, uint64_t wanted) {
    return tail->compare_exchange_weak(*expected, wanted, std::memory_order_relaxed, std::memory_order_relaxed);
}

#endif

static_assert(sizeof(warpweft_line) == 16 && alignof(warpweft_line) == 16, "a line is one access");
static_assert(sizeof(warpweft_counter) == 8, "a counter is one word");

// What became of a message.
enum warpweft_result { WARPWEFT_SENT = 0, WARPWEFT_FULL = 1, WARPWEFT_TOO_LONG = 2 };

// The stamp of the line at `position` of a lane with `1 << shift` lines.
WARPWEFT_FN uint32_t warpweft_stamp(uint64_t position, uint32_t shift) { return (uint32_t)(position >> shift) + 1u; }

WARPWEFT_FN uint32_t warpweft_lines(uint32_t length) {
    return WARPWEFT_HEADER_LINES + (length + WARPWEFT_LINE_BYTES - 1u) / WARPWEFT_LINE_BYTES;
}

// A producer. `tail` is its own if it is the only one, or the tickets of all of them.
struct warpweft_producer {
    warpweft_line *lines;
    const warpweft_counter *credit;
    warpweft_counter *tickets; // null for the only producer
    uint64_t tail;
    uint64_t seen; // the credit when it was last looked at
    uint32_t shift;
};

WARPWEFT_FN void warpweft_put(const warpweft_producer *p, uint64_t position, const uint32_t *three) {
    warpweft_words line = {{three[0], three[1], three[2], warpweft_stamp(position, p->shift)}};
    warpweft_store(&p->lines[position & ((1ull << p->shift) - 1)], line);
}

// Whether as many lines from `tail` on were given back. The credit may have passed a tail that is an old one.
WARPWEFT_FN bool warpweft_fits(warpweft_producer *p, uint64_t tail, uint32_t lines) {
    uint64_t seen = p->seen < tail ? p->seen : tail;
    if (tail + lines - seen <= 1ull << p->shift) return true;
    p->seen = warpweft_look(p->credit);
    seen = p->seen < tail ? p->seen : tail;
    return tail + lines - seen <= 1ull << p->shift;
}

// Sends a message if there is room. A ticket is drawn only for what there is credit for, and behind it nothing waits.
WARPWEFT_FN warpweft_result warpweft_try_push(warpweft_producer *p, warpweft_header header, const uint8_t *payload) {
    uint32_t lines = warpweft_lines(header.length);
    if (header.length > WARPWEFT_MAX_PAYLOAD || lines > 1ull << p->shift) return WARPWEFT_TOO_LONG;
    uint64_t position = p->tickets ? warpweft_look(p->tickets) : p->tail;
    do {
        if (!warpweft_fits(p, position, lines)) return WARPWEFT_FULL;
    } while (p->tickets && !warpweft_draw(p->tickets, &position, position + lines));
    if (!p->tickets) p->tail = position + lines;
    uint32_t words[WARPWEFT_HEADER_WORDS];
    warpweft_pack(header, words);
    for (uint32_t i = 0; i < WARPWEFT_HEADER_LINES; i++) warpweft_put(p, position++, words + 3 * i);
    for (uint32_t at = 0; at < header.length; at += WARPWEFT_LINE_BYTES) {
        uint32_t three[3] = {0, 0, 0};
        for (uint32_t i = 0; i < WARPWEFT_LINE_BYTES && at + i < header.length; i++)
            three[i / 4] |= (uint32_t)payload[at + i] << 8 * (i % 4);
        warpweft_put(p, position++, three);
    }
    return WARPWEFT_SENT;
}

// The consumer.
struct warpweft_consumer {
    const warpweft_line *lines;
    warpweft_counter *credit;
    uint64_t head;
    uint64_t returned; // the credit as it was last given
    uint32_t shift;
};

WARPWEFT_FN bool warpweft_take(const warpweft_consumer *c, uint64_t position, uint32_t *three) {
    warpweft_words line = warpweft_load(&c->lines[position & ((1ull << c->shift) - 1)]);
    for (uint32_t i = 0; i < 3; i++) three[i] = line.w[i];
    return line.w[3] == warpweft_stamp(position, c->shift);
}

WARPWEFT_FN void warpweft_give_back(warpweft_consumer *c) {
    if (c->returned == c->head) return;
    c->returned = c->head;
    warpweft_give(c->credit, c->head);
}

// Reads the next message if it is there whole; `payload` has room for WARPWEFT_MAX_PAYLOAD bytes.
WARPWEFT_FN bool warpweft_try_pop(warpweft_consumer *c, warpweft_header *header, uint8_t *payload) {
    uint32_t words[WARPWEFT_HEADER_WORDS];
    for (uint32_t i = 0; i < WARPWEFT_HEADER_LINES; i++)
        if (!warpweft_take(c, c->head + i, words + 3 * i)) {
            warpweft_give_back(c);
            return false;
        }
    *header = warpweft_unpack(words);
    uint32_t lines = warpweft_lines(header->length);
    // Nobody of ours writes such; whoever did must not lead the reader out of its memory.
    if (header->length > WARPWEFT_MAX_PAYLOAD || lines > 1ull << c->shift) return false;
    uint64_t position = c->head + WARPWEFT_HEADER_LINES;
    for (uint32_t at = 0; at < header->length; at += WARPWEFT_LINE_BYTES) {
        uint32_t three[3];
        if (!warpweft_take(c, position++, three)) return false;
        for (uint32_t i = 0; i < WARPWEFT_LINE_BYTES && at + i < header->length; i++)
            payload[at + i] = (uint8_t)(three[i / 4] >> 8 * (i % 4));
    }
    c->head += lines;
    if (c->head - c->returned >= (1ull << c->shift) / 4) warpweft_give_back(c);
    return true;
}
