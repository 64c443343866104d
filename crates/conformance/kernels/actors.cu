// Actors of the conformance suite and of the GPU suite, and the executor that runs them. For CUDA they are compiled to
// PTX; for the CPU this is C++17, and a library for the stand-in for CUDA. Their names, in the order of their numbers,
// are in src/actors.rs.

#ifdef __CUDACC__
#include <warpweft/resident.cuh>
#endif
#ifdef WARPWEFT_WARP
#include WARPWEFT_WARP
#endif
#include "warpweft_executor.cuh"

WARPWEFT_FN uint64_t long_of(const warpweft_message &m) {
    return m.header.length < 8 ? 0 : warpweft_word(m.payload) | (uint64_t)warpweft_word(m.payload + 4) << 32;
}

WARPWEFT_FN uint32_t word_of(const warpweft_message &m, uint32_t at) {
    return m.header.length < 4 * at + 4 ? 0 : warpweft_word(m.payload + 4 * at);
}

struct None {};

// Answers with what it gets. All threads of a warp may run it.
__device__ void echo(warpweft_context &cx, None *, const warpweft_message &m) { cx.reply(m.payload, m.header.length); }

struct Tally {
    uint64_t count, wrong;
};

// Counts messages, and those whose number is not the count; kind 1 asks for both.
__device__ void tally(warpweft_context &cx, Tally *state, const warpweft_message &m) {
    if (m.header.kind == 1) {
        cx.reply(state, sizeof *state);
        return;
    }
    state->wrong += m.header.length < 8 || long_of(m) != state->count;
    state->count++;
}

struct Source {
    uint32_t to[2], count, unused;
};

// Kind 2 names two actors and a count; then each number goes to both, and the next one to itself.
__device__ void source(warpweft_context &cx, Source *state, const warpweft_message &m) {
    if (m.header.kind == 2) {
        state->to[0] = word_of(m, 0);
        state->to[1] = word_of(m, 1);
        state->count = word_of(m, 2);
        return;
    }
    uint64_t number = long_of(m);
    cx.send(state->to[0], 0, &number, sizeof number);
    cx.send(state->to[1], 0, &number, sizeof number);
    if (++number < state->count) cx.send(cx.id(), 0, &number, sizeof number);
}

// Does not return for as many nanoseconds as it is told, four seconds at most.
__device__ void looping(warpweft_context &cx, None *, const warpweft_message &m) {
    uint64_t began = warpweft_now(), limit = long_of(m) < 4000000000ull ? long_of(m) : 4000000000ull;
    while (warpweft_now() - began < limit) {
    }
    cx.reply(nullptr, 0);
}

struct Gate {
    uint64_t is_open, count, sum;
};

// Defers everything until kind 2 opens it, and then puts numbers together in the order of their coming; kind 1 asks.
__device__ void gate(warpweft_context &cx, Gate *state, const warpweft_message &m) {
    if (m.header.kind == 1) {
        cx.reply(state, sizeof *state);
    } else if (m.header.kind == 2) {
        state->is_open = 1;
    } else if (!state->is_open) {
        cx.defer();
    } else {
        state->count++;
        state->sum = state->sum * 10 + long_of(m);
    }
}

struct Forward {
    uint32_t to, count, priority, deadline_us;
};

// Kind 2 names an actor, how often, a priority and a time limit; everything else is sent there as often.
__device__ void forward(warpweft_context &cx, Forward *state, const warpweft_message &m) {
    if (m.header.kind == 2) {
        *state = {word_of(m, 0), word_of(m, 1), word_of(m, 2), word_of(m, 3)};
        return;
    }
    for (uint32_t i = 0; i < state->count; i++)
        cx.send_with(state->to, m.header.kind, m.payload, m.header.length, state->priority, state->deadline_us);
}

// Is the end of its device.
__device__ void trap(warpweft_context &, None *, const warpweft_message &) {
#ifdef __CUDACC__
    __trap();
#else
    throw 1;
#endif
}

// Words of a checked payload of 64 bytes.
enum { WORDS = 16 };

WARPWEFT_FN uint32_t mixed(uint32_t seed, uint32_t number, uint32_t at) {
    uint32_t word = (number * 16 + at) * 0x9e3779b1u ^ seed * 0x85ebca6bu;
    return word ^ word >> 15;
}

struct Stream {
    uint32_t to, next, end, seed, burst, unused;
};

// Kind 2 names an actor, a count, a seed and how many messages are sent at a time; then as many numbered and checked
// messages go there. Its own turns are messages to itself.
__device__ void stream(warpweft_context &cx, Stream *state, const warpweft_message &m) {
    if (m.header.kind == 2) {
        *state = {word_of(m, 0), 0, word_of(m, 1), word_of(m, 2), word_of(m, 3), 0};
        return;
    }
    for (uint32_t i = 0; i < state->burst && state->next < state->end; i++) {
        uint32_t words[WORDS];
        words[0] = state->next;
        for (uint32_t at = 1; at < WORDS; at++) words[at] = mixed(state->seed, state->next, at);
        if (!cx.send(state->to, 0, words, sizeof words)) break;
        state->next++;
    }
    if (state->next < state->end) cx.send(cx.id(), 0, nullptr, 0);
}

struct Sink {
    uint64_t count, wrong, reordered, began, ended;
    uint32_t seed, next;
};

// Takes what a stream sends: kind 2 names the seed, kind 1 asks.
__device__ void sink(warpweft_context &cx, Sink *state, const warpweft_message &m) {
    if (m.header.kind == 1) {
        cx.reply(state, sizeof *state);
        return;
    }
    if (m.header.kind == 2) {
        *state = {0, 0, 0, 0, 0, word_of(m, 0), 0};
        return;
    }
    uint64_t now = warpweft_now();
    if (state->count == 0) state->began = now;
    state->ended = now;
    state->count++;
    uint32_t number = word_of(m, 0);
    bool is_right = m.header.length == 4 * WORDS;
    for (uint32_t at = 1; is_right && at < WORDS; at++) is_right = word_of(m, at) == mixed(state->seed, number, at);
    state->wrong += !is_right;
    state->reordered += number != state->next;
    state->next = number + 1;
}

enum { SAMPLES = 8192 };

struct Ping {
    uint32_t to, left, done, unused;
    uint64_t began;
    uint32_t took[SAMPLES];
};

// Kind 2 names an actor and a count; then messages of 64 bytes go there and come back, one after the other, and how
// long each took is noted in nanoseconds. Kind 1 asks how many came back, kind 3 for what some of them took.
__device__ void ping(warpweft_context &cx, Ping *state, const warpweft_message &m) {
    uint64_t now = warpweft_now();
    if (m.header.kind == 1) {
        cx.reply(&state->done, sizeof state->done);
        return;
    }
    if (m.header.kind == 3) {
        uint32_t from = word_of(m, 0) < SAMPLES - 1024 ? word_of(m, 0) : SAMPLES - 1024;
        cx.reply(state->took + from, 4096);
        return;
    }
    if (m.header.kind == 2) {
        state->to = word_of(m, 0);
        state->left = word_of(m, 1);
        state->done = 0;
    } else {
        state->took[state->done % SAMPLES] = (uint32_t)(now - state->began);
        state->done++;
    }
    if (state->left == 0) return;
    state->left--;
    uint32_t words[WORDS] = {state->done};
    state->began = warpweft_now();
    cx.send(state->to, 0, words, sizeof words);
}

// Sends back what it gets.
__device__ void pong(warpweft_context &cx, None *, const warpweft_message &m) {
    cx.send(cx.source(), 0, m.payload, m.header.length);
}

__device__ void warpweft_dispatch(uint32_t code, warpweft_context &cx, void *state, const warpweft_message &m) {
    switch (code) {
    case 0: return warpweft_call(echo, cx, state, m);
    case 1: return warpweft_call(tally, cx, state, m);
    case 2: return warpweft_call(source, cx, state, m);
    case 3: return warpweft_call(looping, cx, state, m);
    case 4: return warpweft_call(gate, cx, state, m);
    case 5: return warpweft_call(forward, cx, state, m);
    case 6: return warpweft_call(trap, cx, state, m);
    case 7: return warpweft_call(stream, cx, state, m);
    case 8: return warpweft_call(sink, cx, state, m);
    case 9: return warpweft_call(ping, cx, state, m);
    case 10: return warpweft_call(pong, cx, state, m);
    }
}

#ifdef WARPWEFT_WARP
struct turn_of_warp {
    const warpweft_turn *turn;
    warpweft_share share;
};

static int32_t turn_of_thread(const void *argument) {
    turn_of_warp *own = (turn_of_warp *)argument;
    return warpweft_turn_of(own->turn, &own->share);
}

extern "C" int32_t warpweft_actors(const warpweft_turn *turn) {
    turn_of_warp own;
    own.turn = turn;
    return run_warp(turn_of_thread, &own);
}
#elif !defined(__CUDACC__)
WARPWEFT_LIBRARY
#endif
