// What a message looks like in a lane. Made of the table in src/wire.rs; its tests say how to make it again.
#pragma once

#define WARPWEFT_LINE_BYTES 12u
#define WARPWEFT_HEADER_WORDS 9u
#define WARPWEFT_HEADER_LINES 3u
#define WARPWEFT_MAX_PAYLOAD 16384u
#define WARPWEFT_PRIORITIES 3u
#define WARPWEFT_MAX_HOPS 8u
#define WARPWEFT_ANSWER 1u
#define WARPWEFT_TIMED 2u

struct warpweft_header {
    uint32_t destination;
    uint32_t length;
    uint32_t source;
    uint32_t sequence;
    uint32_t kind;
    uint16_t generation;
    uint8_t priority;
    uint8_t hops;
    uint8_t flags;
    uint32_t correlation;
    uint32_t deadline_us;
    uint32_t sent_ns;
};

WARPWEFT_FN void warpweft_pack(const warpweft_header &h, uint32_t *w) {
    for (uint32_t i = 0; i < WARPWEFT_HEADER_WORDS; i++) w[i] = 0;
    w[0] |= ((uint32_t)h.destination & 0xffffffffu) << 0;
    w[1] |= ((uint32_t)h.length & 0xffffffffu) << 0;
    w[2] |= ((uint32_t)h.source & 0xffffffffu) << 0;
    w[3] |= ((uint32_t)h.sequence & 0xffffffffu) << 0;
    w[4] |= ((uint32_t)h.kind & 0xffffffffu) << 0;
    w[5] |= ((uint32_t)h.generation & 0xffffu) << 0;
    w[5] |= ((uint32_t)h.priority & 0xfu) << 16;
    w[5] |= ((uint32_t)h.hops & 0xfu) << 20;
    w[5] |= ((uint32_t)h.flags & 0xffu) << 24;
    w[6] |= ((uint32_t)h.correlation & 0xffffffffu) << 0;
    w[7] |= ((uint32_t)h.deadline_us & 0xffffffffu) << 0;
    w[8] |= ((uint32_t)h.sent_ns & 0xffffffffu) << 0;
}

WARPWEFT_FN warpweft_header warpweft_unpack(const uint32_t *w) {
    warpweft_header h;
    h.destination = (uint32_t)(w[0] >> 0 & 0xffffffffu);
    h.length = (uint32_t)(w[1] >> 0 & 0xffffffffu);
    h.source = (uint32_t)(w[2] >> 0 & 0xffffffffu);
    h.sequence = (uint32_t)(w[3] >> 0 & 0xffffffffu);
    h.kind = (uint32_t)(w[4] >> 0 & 0xffffffffu);
    h.generation = (uint16_t)(w[5] >> 0 & 0xffffu);
    h.priority = (uint8_t)(w[5] >> 16 & 0xfu);
    h.hops = (uint8_t)(w[5] >> 20 & 0xfu);
    h.flags = (uint8_t)(w[5] >> 24 & 0xffu);
    h.correlation = (uint32_t)(w[6] >> 0 & 0xffffffffu);
    h.deadline_us = (uint32_t)(w[7] >> 0 & 0xffffffffu);
    h.sent_ns = (uint32_t)(w[8] >> 0 & 0xffffffffu);
    return h;
}

static_assert(WARPWEFT_HEADER_WORDS * 4 == WARPWEFT_HEADER_LINES * WARPWEFT_LINE_BYTES, "a header fills its lines");
