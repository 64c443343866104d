// Executors of actors: a warp takes messages from its lanes and calls the handlers of its actors.
//
// A handler is a function of the user's, in CUDA C:
//
//     __device__ void handle(warpweft_context &cx, State *state, const warpweft_message &m);
//
// It is called by one thread, or by all 32 of the warp where its actor says so; all of them make the same calls of `cx`
// then. It never waits: what it sends goes to an outbox, which the warp empties when the handler has returned.
//
// One block of a device is the bridge: it alone looks for what the host sends, hands that on, and writes the table of
// actors. It has a launch of its own, since a handler that loops keeps all blocks of its launch from their next slice.
// The others are executors, some of them in each launch. Whatever an executor remembers lies in device memory that nobody else
// touches, so that a slice may end between any two rounds and another kernel go on. Nothing here waits: a round does what
// can be done now and returns.
//
// For CUDA it is compiled by NVRTC behind <warpweft/resident.cuh>; for the CPU it is C++17, where a warp is one thread.
#pragma once

#ifndef WARPWEFT_LANES_INCLUDED
#define WARPWEFT_LANES_INCLUDED
#include "warpweft_lanes.cuh"
#endif

#ifdef __CUDACC__

// Code that is there once, so that all of it stays near the processor. Not static: NVRTC 12.0 crashes on some of such.
#define WARPWEFT_APART inline __noinline__ __device__

enum { WARPWEFT_THREADS = 32 };
WARPWEFT_FN uint32_t warpweft_lane() { return threadIdx.x; }
WARPWEFT_FN void warpweft_sync() { __syncwarp(); }
WARPWEFT_FN uint32_t warpweft_ballot(bool is) { return __ballot_sync(0xffffffffu, is); }
// What the first thread says, to all, along with everything that it stored before.
WARPWEFT_FN uint32_t warpweft_first(uint32_t value) {
    __syncwarp();
    return __shfl_sync(0xffffffffu, value, 0);
}
WARPWEFT_FN uint64_t warpweft_now() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
// What was stored before is there for whoever sees what is stored later, on this device.
WARPWEFT_FN void warpweft_fence() { __threadfence(); }

#else

#include <chrono>

#define __device__
#define WARPWEFT_APART inline

#ifdef WARPWEFT_WARP
// Whoever makes a warp of something else says what these do.
enum { WARPWEFT_THREADS = 32 };
uint32_t warpweft_lane();
void warpweft_sync(int line = __builtin_LINE());
uint32_t warpweft_ballot(bool is, int line = __builtin_LINE());
uint32_t warpweft_first(uint32_t value, int line = __builtin_LINE());
#else
enum { WARPWEFT_THREADS = 1 };
WARPWEFT_FN uint32_t warpweft_lane() { return 0; }
WARPWEFT_FN void warpweft_sync() {}
WARPWEFT_FN uint32_t warpweft_ballot(bool is) { return is; }
WARPWEFT_FN uint32_t warpweft_first(uint32_t value) { return value; }
#endif
WARPWEFT_FN uint64_t warpweft_now() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return (uint64_t)std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}
WARPWEFT_FN void warpweft_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

#endif

// A word of bytes that begin at a multiple of four, whatever they were stored as.
WARPWEFT_FN uint32_t warpweft_word(const void *from) {
    uint32_t word;
    memcpy(&word, __builtin_assume_aligned(from, 4), 4);
    return word;
}
WARPWEFT_FN void warpweft_set_word(void *to, uint32_t word) { memcpy(__builtin_assume_aligned(to, 4), &word, 4); }

enum { WARPWEFT_DEVICES = 8 };

// Classes of lanes: orders of the host, then a class for each priority.
enum { WARPWEFT_CLASSES = 4 };

// What the host lays out, by offsets into the memory of the device, and of the host's (`host_..`). In this order in Rust.
struct warpweft_config {
    uint64_t executors;   // of this device
    uint64_t all;         // of all devices with such executors
    uint64_t first;       // the first of this device among all
    uint64_t shift;       // a lane has `1 << shift` lines
    uint64_t host_shift;  // and one from or to the host
    uint64_t slots;       // actors of an executor
    uint64_t chunks;      // pieces of memory for messages that wait, of an executor
    uint64_t actors;      // ids that the table holds
    uint64_t sample_every;
    uint64_t table, clock, beats, bridge, rings, credits;
    uint64_t own, own_stride; // what belongs to one executor, and within that:
    uint64_t inputs, outputs, records, pieces, scratch, spill;
    uint64_t host_rings, host_credits, host_returned, host_out, host_out_credits, host_beats, host_counters, host_slots;
};

// What goes from the host to this device.
enum { WARPWEFT_TO_BRIDGE = 0xffffffff };
enum {
    WARPWEFT_INSERT = 1, // executors
    WARPWEFT_STOP = 2,
    WARPWEFT_RESUME = 3,
    WARPWEFT_END = 4, // bury everything, and forget the actor
    WARPWEFT_SWITCH = 5,
    WARPWEFT_INSPECT = 6,
    WARPWEFT_TABLE = 7, // the bridge
    WARPWEFT_CLOCK = 8,
    WARPWEFT_SET_CLOCK = 9
};

// What goes from this device to the host.
enum {
    WARPWEFT_MESSAGE = 1,
    WARPWEFT_DEAD = 2,
    WARPWEFT_DONE = 3,
    WARPWEFT_SAMPLE = 4,
    WARPWEFT_PENDING = 5,
    WARPWEFT_DAMAGED = 6
};

// Why a message is not served, as in dead_letter.rs.
enum {
    WARPWEFT_UNKNOWN_ACTOR = 0,
    WARPWEFT_ACTOR_STOPPED = 1,
    WARPWEFT_EXPIRED = 5,
    WARPWEFT_INBOX_FULL = 6,
    WARPWEFT_UNREACHABLE = 8,
    WARPWEFT_TOO_MANY_HOPS = 9,
    WARPWEFT_REFUSED = 10
};

// Where messages to an actor go next, beside the executors of all devices.
enum { WARPWEFT_BY_HOST = 0xffff, WARPWEFT_NOWHERE = 0xfffe };

// Of an entry of the table; from `WARPWEFT_ENDED` on, the reason is what is beyond it.
enum { WARPWEFT_ALIVE = 1, WARPWEFT_ENDED = 2 };

// Of an actor at its executor.
enum { WARPWEFT_VACANT = 0, WARPWEFT_SERVING = 1, WARPWEFT_STOPPED = 2, WARPWEFT_ENDING = 3 };

// Places of messages that wait, as the host calls them.
enum { WARPWEFT_IN_INBOX = 0, WARPWEFT_IN_DEFERRED = 1, WARPWEFT_IN_OUTBOX = 2, WARPWEFT_IN_KEPT = 3 };

enum {
    WARPWEFT_KINDS = 8,     // kinds of messages that an actor may name
    WARPWEFT_RECORDS = 32,  // messages that a handler may send in one call
    WARPWEFT_NEAR = 1020,   // bytes of a payload for which there is room beside the warp
    WARPWEFT_OUT = 2048,    // and of those that it sends
    WARPWEFT_SPILL = 65536, // bytes of more
    WARPWEFT_PIECE = 192,   // bytes of a payload in a piece of memory: 16 lines
    WARPWEFT_BATCH = 16,    // messages of one lane, or one actor, before others have their turn
    WARPWEFT_RESERVE = 192, // pieces that are left for what handlers send
    WARPWEFT_LETTERS = 160, // lines to the host that one message may lead to, its own answer aside
    WARPWEFT_TOLD = 200     // messages that one inspection tells of
};

// How long a sender waits for room in a lane.
#define WARPWEFT_PATIENCE_NS 1000000000ull

// How often counters and signs of life are told to the host.
#define WARPWEFT_TELL_NS 100000ull

struct warpweft_message {
    warpweft_header header;
    const uint8_t *payload;
};

// A message in the outbox.
struct warpweft_record {
    uint32_t to, kind, length, correlation, deadline_us, priority;
    const uint8_t *bytes;
};

// What the threads of a warp tell each other.
struct warpweft_share {
    uint8_t *device[WARPWEFT_DEVICES];
    uint8_t *host;
    uint32_t words[18]; // of the first lines
    uint32_t count;
    warpweft_header header;
    const uint8_t *payload;
    uint64_t until;
    uint32_t slot, piece, flags, route[3];
    warpweft_line *lines; // of the lane that is written
    uint64_t position;
    uint32_t shift, prefix;
    warpweft_record records[WARPWEFT_RECORDS];
    alignas(16) uint8_t near[WARPWEFT_NEAR + 12];
    alignas(16) uint8_t out[WARPWEFT_OUT];
};

// What a handler can do beside changing its state. If all threads of the warp run it, all of them make the same calls.
struct warpweft_context {
    // The actor, and who sent the message: 0 for the host.
    WARPWEFT_FN uint32_t id() const { return header->destination; }
    WARPWEFT_FN uint32_t source() const { return header->source; }
    // Which thread of the handler's this is, of how many.
    WARPWEFT_FN uint32_t thread() const { return lane; }
    WARPWEFT_FN uint32_t threads() const { return lanes; }

    // Sends a message; false if there is no room for so many, or it is too long, and then it is not sent.
    WARPWEFT_FN bool send(uint32_t to, uint32_t kind, const void *payload, uint32_t length) {
        return push(to, kind, payload, length, 0, WARPWEFT_PRIORITIES, 0);
    }
    // The same with a priority, or WARPWEFT_PRIORITIES for the receiver's own, and microseconds that it may take, or 0.
    WARPWEFT_FN bool send_with(uint32_t to, uint32_t kind, const void *payload, uint32_t length, uint32_t priority,
                               uint32_t deadline_us) {
        return push(to, kind, payload, length, 0, priority, deadline_us);
    }
    // Answers the message, if an answer is expected.
    WARPWEFT_FN bool reply(const void *payload, uint32_t length) {
        if (header->correlation == 0) return true;
        return push(header->source, header->kind, payload, length, header->correlation, WARPWEFT_PRIORITIES, 0);
    }
    // Has the message come again once another was served. What was sent meanwhile stays sent.
    WARPWEFT_FN void defer() { deferred = true; }

    const warpweft_header *header;
    warpweft_share *share;
    uint8_t *spill;
    uint32_t lane, lanes, count, bytes, spilled;
    bool deferred;

    WARPWEFT_FN bool push(uint32_t to, uint32_t kind, const void *payload, uint32_t length, uint32_t correlation,
                          uint32_t priority, uint32_t deadline_us) {
        uint32_t room = (length + 15u) & ~15u;
        if (count == WARPWEFT_RECORDS || length > WARPWEFT_MAX_PAYLOAD) return false;
        bool is_near = bytes + room <= WARPWEFT_OUT;
        if (!is_near && spilled + room > WARPWEFT_SPILL) return false;
        uint8_t *to_bytes = is_near ? share->out + bytes : spill + spilled;
        if (is_near) bytes += room;
        else spilled += room;
        const uint8_t *from = (const uint8_t *)payload;
        uint32_t words = ((uint64_t)from & 3) == 0 ? length / 4 : 0;
        for (uint32_t i = lane; i < words; i += lanes) warpweft_set_word(to_bytes + 4 * i, warpweft_word(from + 4 * i));
        for (uint32_t i = words * 4 + lane; i < length; i += lanes) to_bytes[i] = from[i];
        if (lane == 0) share->records[count] = {to, kind, length, correlation, deadline_us, priority, to_bytes};
        count++;
        return true;
    }
};

// Calls the handler with this number. Whoever puts handlers and executors together defines it.
__device__ void warpweft_dispatch(uint32_t code, warpweft_context &cx, void *state, const warpweft_message &m);

template <class State>
WARPWEFT_FN void warpweft_call(void (*handler)(warpweft_context &, State *, const warpweft_message &),
                               warpweft_context &cx, void *state, const warpweft_message &m) {
    handler(cx, static_cast<State *>(state), m);
}

// A lane as its consumer and as its producer sees it.
struct warpweft_input {
    uint64_t head, returned;
};
struct warpweft_output {
    uint64_t tail, seen;
    uint32_t blocked; // messages that wait for room
    uint32_t full;    // the last round that found it full
};

// A list of pieces or of actors, linked by their numbers.
struct warpweft_list {
    uint32_t first, last;
};

struct alignas(16) warpweft_actor {
    uint32_t id, state, reason, token;
    uint32_t code, threads, capacity, rejects;
    uint64_t within_ns, memory, size;
    uint64_t served, freed;
    warpweft_list waiting[WARPWEFT_PRIORITIES], deferred;
    uint32_t waits, held, is_busy, is_untold, next_busy, next_untold;
    uint32_t kinds, kind[WARPWEFT_KINDS], kind_size[WARPWEFT_KINDS], unused;
};

// Memory of a message that waits: linked to the next message, and to more of the same.
struct alignas(16) warpweft_piece {
    uint32_t next, more;
    uint64_t until; // 0 for no end
    uint32_t flags, owner, target, unused;
    warpweft_header header;
    uint8_t unused_too[8];
    uint8_t payload[WARPWEFT_PIECE];
};
static_assert(sizeof(warpweft_piece) == 272 && sizeof(warpweft_actor) <= 256, "the host lays them out");
enum { WARPWEFT_FROM_HOST = 1 };

struct alignas(16) warpweft_own {
    warpweft_list busy, untold, blocked;
    uint32_t spare, fresh, used, round, until_sample, handled;
    uint32_t is_damaged, unused;
    uint64_t served, handed_on, told_ns, letters_lost;
};
static_assert(sizeof(warpweft_own) <= 256, "the host lays it out");

// Of the bridge, for each class: a message that is being handed on.
struct warpweft_passing {
    uint64_t head, returned, tail;
    uint32_t left, target;
};

// An executor or bridge, as all threads of its warp see it.
struct warpweft_executor {
    warpweft_share *share;
    const warpweft_config *config;
    uint8_t *base, *mine; // of the device, and of what is the executor's alone
    uint8_t *host;
    warpweft_own *own;
    uint32_t index; // of this device's; `config->executors` for the bridge
    uint32_t number; // among all
    uint32_t lane;

    WARPWEFT_FN warpweft_input *input(uint32_t source, uint32_t of_class) const {
        return (warpweft_input *)(mine + config->inputs) + source * WARPWEFT_CLASSES + of_class;
    }
    WARPWEFT_FN warpweft_output *output(uint32_t target, uint32_t priority) const {
        return (warpweft_output *)(mine + config->outputs) + target * WARPWEFT_PRIORITIES + priority;
    }
    WARPWEFT_FN warpweft_actor *actor(uint32_t slot) const { return (warpweft_actor *)(mine + config->records) + slot; }
    WARPWEFT_FN warpweft_piece *piece(uint32_t number_of) const {
        return (warpweft_piece *)(mine + config->pieces) + number_of;
    }
    // The lane to an executor of some device from another executor, or from the host.
    WARPWEFT_FN warpweft_line *ring(uint32_t to, uint32_t source, uint32_t of_class) const {
        uint32_t each = (uint32_t)config->executors, sources = (uint32_t)config->all + 1;
        uint64_t lane_at = ((uint64_t)(to % each) * sources + source) * WARPWEFT_CLASSES + of_class;
        return (warpweft_line *)(share->device[to / each] + config->rings) + (lane_at << config->shift);
    }
    // What a receiver has given back to a sender, in the sender's memory.
    WARPWEFT_FN warpweft_counter *credit(uint32_t from, uint32_t to, uint32_t of_class) const {
        uint32_t each = (uint32_t)config->executors;
        uint64_t at = ((uint64_t)(from % each) * config->all + to) * WARPWEFT_CLASSES + of_class;
        return (warpweft_counter *)(share->device[from / each] + config->credits) + at;
    }
    WARPWEFT_FN warpweft_counter *host_word(uint64_t from, uint64_t at) const {
        return (warpweft_counter *)(host + from) + at;
    }
};

// ---- Lines

// Bytes `at..at + 12` of a payload as words, with zeros behind its end. Payloads begin at multiples of four.
WARPWEFT_FN void warpweft_three(const uint8_t *payload, uint32_t at, uint32_t length, uint32_t *three) {
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t from = at + 4 * i, word = 0;
        if (from + 4 <= length) word = warpweft_word(payload + from);
        else
            for (uint32_t byte = from; byte < length; byte++) word |= (uint32_t)payload[byte] << 8 * (byte - from);
        three[i] = word;
    }
}

// Writes the message of `share` to its lane, each thread its lines.
WARPWEFT_FN void warpweft_write(const warpweft_executor &x) {
    warpweft_share *s = x.share;
    uint32_t prefix = s->prefix, length = s->header.length, total = prefix + warpweft_lines(length);
    uint64_t mask = (1ull << s->shift) - 1;
    uint32_t words[WARPWEFT_HEADER_WORDS];
    warpweft_pack(s->header, words);
    for (uint32_t i = x.lane; i < total; i += WARPWEFT_THREADS) {
        uint64_t position = s->position + i;
        uint32_t three[3] = {s->route[0], s->route[1], s->route[2]};
        if (i >= prefix + WARPWEFT_HEADER_LINES)
            warpweft_three(s->payload, (i - prefix - WARPWEFT_HEADER_LINES) * WARPWEFT_LINE_BYTES, length, three);
        else if (i >= prefix)
            for (uint32_t k = 0; k < WARPWEFT_HEADER_LINES; k++)
                if (i - prefix == k)
                    for (uint32_t w = 0; w < 3; w++) three[w] = words[3 * k + w];
        warpweft_store(&s->lines[position & mask],
                       {{three[0], three[1], three[2], warpweft_stamp(position, s->shift)}});
    }
}

// ---- To the host

WARPWEFT_FN warpweft_output *warpweft_to_host(const warpweft_executor &x) { return x.output((uint32_t)x.config->all, 0); }

// Whether the lane to the host takes as many lines.
WARPWEFT_FN bool warpweft_host_takes(const warpweft_executor &x, uint32_t lines) {
    warpweft_output *out = warpweft_to_host(x);
    uint64_t all = 1ull << x.config->host_shift;
    if (out->tail + lines - out->seen <= all) return true;
    out->seen = warpweft_look(x.host_word(x.config->host_out_credits, x.index));
    return out->tail + lines - out->seen <= all;
}

WARPWEFT_FN warpweft_line *warpweft_host_lane(const warpweft_executor &x) {
    return (warpweft_line *)(x.host + x.config->host_out) + ((uint64_t)x.index << x.config->host_shift);
}

// Tells the host something, with a header and without a payload. One thread does.
WARPWEFT_APART void warpweft_tell(const warpweft_executor &x, uint32_t what, uint32_t a, uint32_t b,
                               const warpweft_header &header) {
    if (!warpweft_host_takes(x, 1 + WARPWEFT_HEADER_LINES)) {
        x.own->letters_lost++;
        return;
    }
    warpweft_output *out = warpweft_to_host(x);
    warpweft_line *lines = warpweft_host_lane(x);
    uint32_t shift = (uint32_t)x.config->host_shift, words[WARPWEFT_HEADER_WORDS];
    uint64_t mask = (1ull << shift) - 1;
    warpweft_header without = header;
    without.length = 0;
    warpweft_pack(without, words);
    warpweft_store(&lines[out->tail & mask], {{what, a, b, warpweft_stamp(out->tail, shift)}});
    for (uint32_t i = 0; i < WARPWEFT_HEADER_LINES; i++) {
        uint64_t position = out->tail + 1 + i;
        warpweft_store(&lines[position & mask],
                       {{words[3 * i], words[3 * i + 1], words[3 * i + 2], warpweft_stamp(position, shift)}});
    }
    out->tail += 1 + WARPWEFT_HEADER_LINES;
}

WARPWEFT_FN void warpweft_bury(const warpweft_executor &x, const warpweft_header &header, uint32_t reason) {
    warpweft_tell(x, WARPWEFT_DEAD, reason, header.length, header);
}

WARPWEFT_FN void warpweft_done(const warpweft_executor &x, uint32_t token, uint64_t value) {
    warpweft_header none{};
    none.sent_ns = (uint32_t)(value >> 32);
    warpweft_tell(x, WARPWEFT_DONE, token, (uint32_t)value, none);
}

// ---- Pieces of memory and lists of them

WARPWEFT_FN uint32_t warpweft_pieces_of(uint32_t length) {
    return length == 0 ? 1 : (length + WARPWEFT_PIECE - 1) / WARPWEFT_PIECE;
}

WARPWEFT_FN bool warpweft_has_pieces(const warpweft_executor &x, uint32_t count) {
    return x.own->used + count < x.config->chunks;
}

WARPWEFT_FN uint32_t warpweft_take_piece(const warpweft_executor &x) {
    warpweft_own *own = x.own;
    uint32_t taken = own->spare;
    if (taken != 0) own->spare = x.piece(taken)->more;
    else taken = ++own->fresh;
    own->used++;
    x.piece(taken)->more = 0;
    return taken;
}

// Memory for a message, or 0.
WARPWEFT_FN uint32_t warpweft_take_pieces(const warpweft_executor &x, uint32_t length) {
    uint32_t count = warpweft_pieces_of(length);
    if (!warpweft_has_pieces(x, count)) return 0;
    uint32_t first = warpweft_take_piece(x), last = first;
    for (uint32_t i = 1; i < count; i++) {
        uint32_t next = warpweft_take_piece(x);
        x.piece(last)->more = next;
        last = next;
    }
    return first;
}

WARPWEFT_FN void warpweft_free(const warpweft_executor &x, uint32_t first) {
    while (first != 0) {
        uint32_t more = x.piece(first)->more;
        x.piece(first)->more = x.own->spare;
        x.own->spare = first;
        x.own->used--;
        first = more;
    }
}

WARPWEFT_FN void warpweft_append(const warpweft_executor &x, warpweft_list *list, uint32_t number) {
    x.piece(number)->next = 0;
    if (list->first == 0) list->first = number;
    else x.piece(list->last)->next = number;
    list->last = number;
}

WARPWEFT_FN uint32_t warpweft_take_first(const warpweft_executor &x, warpweft_list *list) {
    uint32_t first = list->first;
    if (first != 0) {
        list->first = x.piece(first)->next;
        if (list->first == 0) list->last = 0;
    }
    return first;
}

// Copies the payload of `share` into the pieces from `share->piece` on.
WARPWEFT_FN void warpweft_into_pieces(const warpweft_executor &x) {
    warpweft_share *s = x.share;
    uint32_t words = (s->header.length + 3) / 4;
    for (uint32_t at = s->piece, done = 0; at != 0 && done < words; at = x.piece(at)->more, done += WARPWEFT_PIECE / 4)
        for (uint32_t i = x.lane; i < WARPWEFT_PIECE / 4 && done + i < words; i += WARPWEFT_THREADS)
            warpweft_set_word(x.piece(at)->payload + 4 * i, warpweft_word(s->payload + 4 * (done + i)));
}

// The payload of the pieces from `number` on, together.
WARPWEFT_FN const uint8_t *warpweft_together(const warpweft_executor &x, uint32_t number) {
    uint32_t length = x.piece(number)->header.length;
    if (length <= WARPWEFT_PIECE) return x.piece(number)->payload;
    uint8_t *to = x.mine + x.config->scratch;
    uint32_t words = (length + 3) / 4;
    for (uint32_t at = number, done = 0; at != 0 && done < words; at = x.piece(at)->more, done += WARPWEFT_PIECE / 4)
        for (uint32_t i = x.lane; i < WARPWEFT_PIECE / 4 && done + i < words; i += WARPWEFT_THREADS)
            warpweft_set_word(to + 4 * (done + i), warpweft_word(x.piece(at)->payload + 4 * i));
    warpweft_sync();
    return to;
}

// ---- The table of actors

struct warpweft_entry {
    uint32_t next, slot, priority, generation, state;
};

WARPWEFT_FN warpweft_entry warpweft_find(const warpweft_executor &x, uint32_t id) {
    if (id == 0 || id >= x.config->actors) return {0, 0, 0, 0, 0};
    warpweft_words w = warpweft_load((const warpweft_line *)(x.base + x.config->table) + id);
    return {w.w[0] & 0xffff, w.w[0] >> 16, w.w[1] & 0xff, w.w[2] & 0xffff, w.w[3]};
}

WARPWEFT_FN uint32_t warpweft_why_gone(const warpweft_entry &entry) {
    return entry.state >= WARPWEFT_ENDED ? entry.state - WARPWEFT_ENDED : (uint32_t)WARPWEFT_UNKNOWN_ACTOR;
}

// ---- Actors

WARPWEFT_FN void warpweft_set_busy(const warpweft_executor &x, uint32_t slot) {
    warpweft_actor *a = x.actor(slot);
    if (a->is_busy) return;
    a->is_busy = 1;
    a->next_busy = 0;
    warpweft_list *busy = &x.own->busy;
    if (busy->first == 0) busy->first = slot + 1;
    else x.actor(busy->last - 1)->next_busy = slot + 1;
    busy->last = slot + 1;
}

WARPWEFT_FN void warpweft_tell_counters(const warpweft_executor &x, uint32_t slot) {
    warpweft_actor *a = x.actor(slot);
    uint64_t at = ((uint64_t)x.index * x.config->slots + slot) * 2;
    warpweft_give(x.host_word(x.config->host_slots, at), a->served);
    warpweft_give(x.host_word(x.config->host_slots, at + 1), a->freed);
}

// Counters of messages that stay on devices are told now and then, since each telling is a trip to the host.
WARPWEFT_FN void warpweft_count(const warpweft_executor &x, uint32_t slot, uint32_t flags) {
    warpweft_actor *a = x.actor(slot);
    if (flags & WARPWEFT_FROM_HOST) {
        a->freed++;
        warpweft_tell_counters(x, slot);
    } else if (!a->is_untold) {
        a->is_untold = 1;
        a->next_untold = x.own->untold.first;
        x.own->untold.first = slot + 1;
    }
}

WARPWEFT_FN void warpweft_tell_all(const warpweft_executor &x) {
    uint64_t now = warpweft_now();
    if (now - x.own->told_ns < WARPWEFT_TELL_NS) return;
    x.own->told_ns = now;
    for (uint32_t next = x.own->untold.first; next != 0;) {
        warpweft_actor *a = x.actor(next - 1);
        warpweft_tell_counters(x, next - 1);
        a->is_untold = 0;
        next = a->next_untold;
    }
    x.own->untold.first = 0;
    warpweft_give(x.host_word(x.config->host_counters, x.index * 4), x.own->served);
    warpweft_give(x.host_word(x.config->host_counters, x.index * 4 + 1), x.own->handed_on);
    warpweft_give(x.host_word(x.config->host_counters, x.index * 4 + 2), x.own->letters_lost);
}

// The host's clock, of which messages have the lowest bits.
WARPWEFT_FN uint32_t warpweft_host_ns(const warpweft_executor &x, uint64_t now) {
    return (uint32_t)(now + warpweft_look((const warpweft_counter *)(x.base + x.config->clock)));
}

// When a message's time is over, by the device's clock.
WARPWEFT_FN uint64_t warpweft_until(const warpweft_executor &x, const warpweft_header &header) {
    if (header.deadline_us == 0) return 0;
    uint64_t now = warpweft_now(), all = header.deadline_us * 1000ull;
    // Clocks of two devices are some microseconds apart: what comes from the future has come just now.
    uint32_t passed = warpweft_host_ns(x, now) - header.sent_ns;
    if (passed > 0x80000000u) passed = 0;
    return passed >= all ? now : now + (all - passed);
}

WARPWEFT_FN bool warpweft_accepts(const warpweft_actor *a, const warpweft_header &header) {
    if (a->kinds == 0 || (header.flags & WARPWEFT_ANSWER)) return true;
    for (uint32_t i = 0; i < a->kinds; i++)
        if (a->kind[i] == header.kind) return a->kind_size[i] == header.length;
    return false;
}

// ---- Receiving

// What to do with a message, as the first thread decides.
enum { WARPWEFT_NOTHING = 0, WARPWEFT_SERVE = 1, WARPWEFT_KEEP = 2, WARPWEFT_PASS = 3 };

// Finds memory for the message of `share` in an actor's inbox; without any it is dead.
WARPWEFT_FN uint32_t warpweft_admit(const warpweft_executor &x, uint32_t slot) {
    warpweft_share *s = x.share;
    warpweft_actor *a = x.actor(slot);
    bool is_hosts = s->flags & WARPWEFT_FROM_HOST;
    // The host counts by itself.
    bool is_over = !is_hosts && a->waits >= a->capacity;
    s->piece = is_over && a->rejects ? 0 : warpweft_take_pieces(x, s->header.length);
    if (s->piece == 0) {
        warpweft_bury(x, s->header, WARPWEFT_INBOX_FULL);
        if (is_hosts) warpweft_count(x, slot, s->flags);
        return WARPWEFT_NOTHING;
    }
    if (is_over) {
        uint64_t limit = warpweft_now() + a->within_ns;
        if (s->until == 0 || limit < s->until) s->until = limit;
    }
    warpweft_piece *p = x.piece(s->piece);
    p->header = s->header;
    p->until = s->until;
    p->flags = s->flags;
    warpweft_append(x, &a->waiting[s->header.priority], s->piece);
    a->waits++;
    warpweft_set_busy(x, slot);
    return WARPWEFT_KEEP;
}

// Decides about the message of `share`, which is for an actor of this executor if the table is right.
WARPWEFT_FN uint32_t warpweft_receive(const warpweft_executor &x, bool may_serve) {
    warpweft_share *s = x.share;
    warpweft_entry entry = warpweft_find(x, s->header.destination);
    if (entry.state != WARPWEFT_ALIVE) {
        warpweft_bury(x, s->header, warpweft_why_gone(entry));
        return WARPWEFT_NOTHING;
    }
    if (entry.next != x.number) {
        s->header.hops++;
        if (s->header.hops > WARPWEFT_MAX_HOPS) {
            s->header.hops--;
            warpweft_bury(x, s->header, WARPWEFT_TOO_MANY_HOPS);
            return WARPWEFT_NOTHING;
        }
        x.own->handed_on++;
        s->count = entry.next;
        return WARPWEFT_PASS;
    }
    uint32_t slot = s->slot = entry.slot;
    warpweft_actor *a = x.actor(slot);
    bool is_here = a->id == s->header.destination && a->state != WARPWEFT_VACANT;
    if (!is_here || a->state == WARPWEFT_ENDING || !warpweft_accepts(a, s->header)) {
        uint32_t reason = !is_here                        ? (uint32_t)WARPWEFT_ACTOR_STOPPED
                          : a->state == WARPWEFT_ENDING ? a->reason
                                                        : (uint32_t)WARPWEFT_REFUSED;
        warpweft_bury(x, s->header, reason);
        if (is_here) warpweft_count(x, slot, s->flags);
        return WARPWEFT_NOTHING;
    }
    s->until = warpweft_until(x, s->header);
    if (may_serve && a->state == WARPWEFT_SERVING && a->waits == 0 && a->held == 0) return WARPWEFT_SERVE;
    return warpweft_admit(x, slot);
}

// ---- Sending

// Puts the message of `share` behind what waits for the same lane, until `until`.
WARPWEFT_FN uint32_t warpweft_block(const warpweft_executor &x, uint32_t target, uint32_t owner) {
    warpweft_share *s = x.share;
    s->piece = warpweft_take_pieces(x, s->header.length);
    if (s->piece == 0) {
        warpweft_bury(x, s->header, WARPWEFT_INBOX_FULL);
        return WARPWEFT_NOTHING;
    }
    warpweft_piece *p = x.piece(s->piece);
    uint64_t limit = warpweft_now() + WARPWEFT_PATIENCE_NS;
    p->header = s->header;
    p->until = s->until != 0 && s->until < limit ? s->until : limit;
    p->owner = owner;
    p->target = target;
    warpweft_append(x, &x.own->blocked, s->piece);
    x.output(target, s->header.priority)->blocked++;
    if (owner != 0) x.actor(owner - 1)->held++;
    return WARPWEFT_KEEP;
}

// Whether the lane to an executor, or to the host, has room; and if so, where.
WARPWEFT_FN bool warpweft_find_room(const warpweft_executor &x, uint32_t target) {
    warpweft_share *s = x.share;
    uint32_t lines = warpweft_lines(s->header.length), of_class = s->header.priority + 1u;
    if (target == x.config->all) {
        if (!warpweft_host_takes(x, 1 + lines + WARPWEFT_LETTERS)) return false;
        warpweft_output *out = warpweft_to_host(x);
        s->lines = warpweft_host_lane(x);
        s->position = out->tail;
        s->shift = (uint32_t)x.config->host_shift;
        s->prefix = 1;
        s->route[0] = WARPWEFT_MESSAGE;
        s->route[1] = s->route[2] = 0;
        out->tail += 1 + lines;
        return true;
    }
    warpweft_output *out = x.output(target, s->header.priority);
    uint64_t all = 1ull << x.config->shift;
    if (out->tail + lines - out->seen > all) {
        out->seen = warpweft_look(x.credit(x.number, target, of_class));
        if (out->tail + lines - out->seen > all) return false;
    }
    s->lines = x.ring(target, x.number, of_class);
    s->position = out->tail;
    s->shift = (uint32_t)x.config->shift;
    s->prefix = 0;
    out->tail += lines;
    return true;
}

// Sends the message of `share` on to `next`, of an actor of this executor (its slot plus 1) or of another's.
WARPWEFT_FN uint32_t warpweft_send(const warpweft_executor &x, uint32_t next, uint32_t owner) {
    warpweft_share *s = x.share;
    if (next == WARPWEFT_NOWHERE) {
        warpweft_bury(x, s->header, WARPWEFT_UNREACHABLE);
        return WARPWEFT_NOTHING;
    }
    uint32_t target = next == WARPWEFT_BY_HOST ? (uint32_t)x.config->all : next;
    // Behind what waits, so that the order is kept.
    if (x.output(target, s->header.priority)->blocked == 0 && warpweft_find_room(x, target)) return WARPWEFT_PASS;
    return warpweft_block(x, target, owner);
}

// Decides about a message of the outbox.
WARPWEFT_FN uint32_t warpweft_post(const warpweft_executor &x, const warpweft_record &record, uint32_t from,
                                   uint32_t from_slot) {
    warpweft_share *s = x.share;
    warpweft_header h{};
    h.destination = record.to;
    h.length = record.length;
    h.source = from;
    h.kind = record.kind;
    h.priority = 1;
    s->until = 0;
    s->flags = 0;
    s->payload = record.bytes;
    if (record.correlation != 0) {
        h.flags = WARPWEFT_ANSWER;
        h.correlation = record.correlation;
    }
    if (record.to == 0) {
        s->header = h;
        if (record.correlation != 0) return warpweft_send(x, WARPWEFT_BY_HOST, from_slot + 1);
        warpweft_bury(x, h, WARPWEFT_UNKNOWN_ACTOR);
        return WARPWEFT_NOTHING;
    }
    warpweft_entry entry = warpweft_find(x, record.to);
    h.priority = (uint8_t)(record.priority < WARPWEFT_PRIORITIES ? record.priority : entry.priority);
    h.generation = (uint16_t)entry.generation;
    h.deadline_us = record.deadline_us;
    bool is_sampled = x.own->until_sample == 0;
    x.own->until_sample = is_sampled ? (uint32_t)x.config->sample_every : x.own->until_sample - 1;
    if (is_sampled || record.deadline_us != 0) {
        uint64_t now = warpweft_now();
        h.flags |= WARPWEFT_TIMED;
        h.sent_ns = warpweft_host_ns(x, now);
        if (record.deadline_us != 0) s->until = now + record.deadline_us * 1000ull;
    }
    s->header = h;
    if (entry.state != WARPWEFT_ALIVE) {
        warpweft_bury(x, h, warpweft_why_gone(entry));
        return WARPWEFT_NOTHING;
    }
    if (entry.next != x.number) return warpweft_send(x, entry.next, from_slot + 1);
    // To an actor of the same executor it goes from memory to memory of this warp.
    return warpweft_receive(x, false);
}

// Carries out what was decided about the message of `share`.
WARPWEFT_FN void warpweft_carry_out(const warpweft_executor &x, uint32_t action) {
    if (action == WARPWEFT_KEEP) warpweft_into_pieces(x);
    if (action == WARPWEFT_PASS) warpweft_write(x);
    warpweft_sync();
}

// Sends what a handler has left in the outbox.
WARPWEFT_FN void warpweft_flush(const warpweft_executor &x, uint32_t count, uint32_t from, uint32_t from_slot) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t action = x.lane == 0 ? warpweft_post(x, x.share->records[i], from, from_slot) : 0;
        warpweft_carry_out(x, warpweft_first(action));
    }
}

// Hands on the message of `share`, whose receiver is elsewhere.
WARPWEFT_FN void warpweft_pass(const warpweft_executor &x) {
    uint32_t action = WARPWEFT_NOTHING;
    if (x.lane == 0) {
        x.share->until = warpweft_until(x, x.share->header);
        action = warpweft_send(x, x.share->count, 0);
    }
    warpweft_carry_out(x, warpweft_first(action));
}

// Tries again what found no room.
WARPWEFT_APART void warpweft_unblock(const warpweft_executor &x) {
    warpweft_share *s = x.share;
    uint32_t before = 0, at = x.own->blocked.first;
    for (uint32_t tries = 0; at != 0 && tries < 4 * WARPWEFT_BATCH; tries++) {
        warpweft_piece *p = x.piece(at);
        uint32_t next = p->next;
        uint32_t action = WARPWEFT_KEEP;
        warpweft_sync();
        if (x.lane == 0) {
            warpweft_output *out = x.output(p->target, p->header.priority);
            s->header = p->header;
            warpweft_entry entry = warpweft_find(x, p->header.destination);
            if (warpweft_now() >= p->until) {
                warpweft_bury(x, p->header, WARPWEFT_EXPIRED);
                action = WARPWEFT_NOTHING;
            } else if (p->header.destination != 0 && entry.state != WARPWEFT_ALIVE) {
                warpweft_bury(x, p->header, warpweft_why_gone(entry));
                action = WARPWEFT_NOTHING;
            } else if (out->full != x.own->round) {
                if (warpweft_find_room(x, p->target)) action = WARPWEFT_PASS;
                else out->full = x.own->round;
            }
        }
        action = warpweft_first(action);
        if (action == WARPWEFT_PASS) {
            const uint8_t *payload = warpweft_together(x, at);
            if (x.lane == 0) s->payload = payload;
            warpweft_sync();
            warpweft_write(x);
            warpweft_sync();
        }
        if (action != WARPWEFT_KEEP && x.lane == 0) {
            x.output(p->target, p->header.priority)->blocked--;
            if (p->owner != 0) {
                x.actor(p->owner - 1)->held--;
                warpweft_set_busy(x, p->owner - 1);
            }
            if (before == 0) x.own->blocked.first = next;
            else x.piece(before)->next = next;
            if (next == 0) x.own->blocked.last = before;
            warpweft_free(x, at);
        }
        if (action == WARPWEFT_KEEP) before = at;
        at = next;
        warpweft_sync();
    }
}

// ---- Serving

WARPWEFT_FN void warpweft_sample(const warpweft_executor &x, const warpweft_header &header) {
    if (!(header.flags & WARPWEFT_TIMED) || !warpweft_host_takes(x, 2 * WARPWEFT_LETTERS)) return;
    uint32_t took = warpweft_host_ns(x, warpweft_now()) - header.sent_ns;
    if (took < 0x80000000u) warpweft_tell(x, WARPWEFT_SAMPLE, header.source, took, header);
}

// Puts what was deferred before what came later.
WARPWEFT_FN void warpweft_undefer(const warpweft_executor &x, warpweft_actor *a) {
    warpweft_list again[WARPWEFT_PRIORITIES] = {};
    while (uint32_t number = warpweft_take_first(x, &a->deferred)) {
        warpweft_append(x, &again[x.piece(number)->header.priority], number);
        a->waits++;
    }
    for (uint32_t i = 0; i < WARPWEFT_PRIORITIES; i++) {
        if (again[i].first == 0) continue;
        x.piece(again[i].last)->next = a->waiting[i].first;
        if (a->waiting[i].first == 0) a->waiting[i].last = again[i].last;
        a->waiting[i].first = again[i].first;
    }
}

// Calls the handler of the actor at `share->slot` with the message of `share`. `held` is its memory, or 0 if it has none.
WARPWEFT_APART void warpweft_serve(const warpweft_executor &x, uint32_t held) {
    warpweft_share *s = x.share;
    uint32_t slot = s->slot;
    warpweft_actor *a = x.actor(slot);
    warpweft_counter *beat = (warpweft_counter *)(x.base + x.config->beats) + x.index;
    uint32_t action = WARPWEFT_SERVE;
    if (x.lane == 0) {
        if (s->until != 0 && warpweft_now() >= s->until) {
            warpweft_bury(x, s->header, WARPWEFT_EXPIRED);
            warpweft_count(x, slot, s->flags);
            warpweft_free(x, held);
            action = WARPWEFT_NOTHING;
        } else {
            warpweft_sample(x, s->header);
            x.own->handled++;
            warpweft_give(beat, (uint64_t)a->id << 32 | x.own->handled);
        }
    }
    if (warpweft_first(action) != WARPWEFT_SERVE) return;
    warpweft_message m = {s->header, s->payload};
    uint32_t threads = a->threads < WARPWEFT_THREADS ? a->threads : (uint32_t)WARPWEFT_THREADS, flags = s->flags;
    uint64_t until = s->until;
    warpweft_context cx;
    cx.header = &m.header;
    cx.share = s;
    cx.spill = x.mine + x.config->spill;
    cx.lane = x.lane;
    cx.lanes = threads;
    cx.count = cx.bytes = cx.spilled = 0;
    cx.deferred = false;
    warpweft_sync();
    if (x.lane < threads) warpweft_dispatch(a->code, cx, x.base + a->memory, m);
    bool deferred = warpweft_first(cx.deferred) != 0;
    uint32_t count = warpweft_first(cx.count);
    if (x.lane == 0) {
        warpweft_give(beat, x.own->handled);
        if (!deferred) {
            a->served++;
            x.own->served++;
            warpweft_count(x, slot, flags);
            warpweft_undefer(x, a);
        } else if (held == 0) {
            s->header = m.header;
            s->payload = m.payload;
            s->piece = warpweft_take_pieces(x, m.header.length);
            if (s->piece == 0) {
                warpweft_bury(x, m.header, WARPWEFT_INBOX_FULL);
                warpweft_count(x, slot, flags);
            } else {
                warpweft_piece *p = x.piece(s->piece);
                p->header = m.header;
                p->until = until;
                p->flags = flags;
            }
        } else {
            s->piece = held;
        }
    }
    warpweft_sync();
    if (deferred && held == 0 && s->piece != 0) warpweft_into_pieces(x);
    warpweft_sync();
    if (x.lane == 0) {
        if (deferred && s->piece != 0) warpweft_append(x, &a->deferred, s->piece);
        if (!deferred) warpweft_free(x, held);
        if (a->waits > 0) warpweft_set_busy(x, slot);
    }
    warpweft_sync();
    warpweft_flush(x, count, m.header.destination, slot);
}

// Serves a message that waits; whether there was one.
WARPWEFT_FN bool warpweft_serve_waiting(const warpweft_executor &x, uint32_t slot) {
    warpweft_share *s = x.share;
    warpweft_actor *a = x.actor(slot);
    uint32_t number = 0;
    if (x.lane == 0) {
        bool may = a->state == WARPWEFT_SERVING && a->held == 0 && warpweft_host_takes(x, 2 * WARPWEFT_LETTERS);
        for (uint32_t i = 0; may && number == 0 && i < WARPWEFT_PRIORITIES; i++)
            number = warpweft_take_first(x, &a->waiting[i]);
        if (number != 0) {
            warpweft_piece *p = x.piece(number);
            a->waits--;
            s->header = p->header;
            s->until = p->until;
            s->flags = p->flags;
            s->slot = slot;
        }
    }
    number = warpweft_first(number);
    if (number == 0) return false;
    const uint8_t *payload = warpweft_together(x, number);
    if (x.lane == 0) s->payload = payload;
    warpweft_sync();
    warpweft_serve(x, number);
    warpweft_sync();
    return true;
}

// Buries some of what an actor has that ends; forgets the actor when it has nothing more. One thread does.
WARPWEFT_FN bool warpweft_end_some(const warpweft_executor &x, uint32_t slot) {
    warpweft_actor *a = x.actor(slot);
    for (uint32_t i = 0; i < WARPWEFT_BATCH; i++) {
        if (!warpweft_host_takes(x, WARPWEFT_LETTERS)) return false;
        uint32_t number = warpweft_take_first(x, &a->deferred);
        for (uint32_t p = 0; number == 0 && p < WARPWEFT_PRIORITIES; p++)
            number = warpweft_take_first(x, &a->waiting[p]);
        if (number == 0) {
            // What it sent and found no room is given up by its lane's patience, in nobody's name.
            for (uint32_t at = x.own->blocked.first; at != 0; at = x.piece(at)->next)
                if (x.piece(at)->owner == slot + 1) x.piece(at)->owner = 0;
            uint32_t token = a->token;
            a->state = WARPWEFT_VACANT;
            a->id = a->waits = a->held = 0;
            if (token != 0) warpweft_done(x, token, 0);
            return true;
        }
        warpweft_bury(x, x.piece(number)->header, a->reason);
        if (x.piece(number)->flags & WARPWEFT_FROM_HOST) a->freed++;
        warpweft_free(x, number);
    }
    return false;
}

// Goes on with actors that have something to do beside what comes in.
WARPWEFT_FN void warpweft_go_on(const warpweft_executor &x) {
    uint32_t last = x.own->busy.last;
    // Those that are busy now, each once.
    for (bool more = x.own->busy.first != 0; more;) {
        warpweft_sync();
        uint32_t slot = x.own->busy.first - 1;
        warpweft_actor *a = x.actor(slot);
        more = slot + 1 != last && a->next_busy != 0;
        uint32_t state = a->state;
        warpweft_sync();
        if (x.lane == 0) {
            x.own->busy.first = a->next_busy;
            if (a->next_busy == 0) x.own->busy.last = 0;
            a->is_busy = 0;
            if (state == WARPWEFT_ENDING && !warpweft_end_some(x, slot)) warpweft_set_busy(x, slot);
        }
        warpweft_sync();
        if (state == WARPWEFT_SERVING) {
            for (uint32_t i = 0; i < WARPWEFT_BATCH && warpweft_serve_waiting(x, slot); i++) {
            }
            if (x.lane == 0 && a->state == WARPWEFT_SERVING && a->waits > 0 && a->held == 0) warpweft_set_busy(x, slot);
        }
        warpweft_sync();
    }
}

// ---- Orders

// An actor to begin, as the host describes it.
struct warpweft_insert {
    uint32_t slot, code, threads, capacity, rejects, kinds;
    uint64_t within_ns, memory, size;
    uint32_t kind[WARPWEFT_KINDS], kind_size[WARPWEFT_KINDS];
};

WARPWEFT_FN void warpweft_tell_pending(const warpweft_executor &x, uint32_t *told, uint32_t first, uint32_t place) {
    uint64_t now = warpweft_now();
    for (uint32_t at = first; at != 0 && *told < WARPWEFT_TOLD; at = x.piece(at)->next, ++*told) {
        warpweft_piece *p = x.piece(at);
        uint64_t left = p->until > now ? (p->until - now) / 1000 + 1 : 1;
        uint32_t left_us = p->until == 0 ? 0 : left < 0xffffffffu ? (uint32_t)left : 0xffffffffu;
        warpweft_tell(x, WARPWEFT_PENDING, place, left_us, p->header);
    }
}

WARPWEFT_FN void warpweft_inspect(const warpweft_executor &x) {
    uint32_t told = 0;
    for (uint32_t slot = 0; slot < x.config->slots && told < WARPWEFT_TOLD; slot++) {
        warpweft_actor *a = x.actor(slot);
        if (a->state == WARPWEFT_VACANT) continue;
        uint32_t place = a->state == WARPWEFT_SERVING ? WARPWEFT_IN_INBOX : WARPWEFT_IN_KEPT;
        for (uint32_t i = 0; i < WARPWEFT_PRIORITIES; i++) warpweft_tell_pending(x, &told, a->waiting[i].first, place);
        warpweft_tell_pending(x, &told, a->deferred.first, WARPWEFT_IN_DEFERRED);
    }
    warpweft_tell_pending(x, &told, x.own->blocked.first, WARPWEFT_IN_OUTBOX);
}

// Carries out an order of the host's; its payload is that of `share`. All threads.
WARPWEFT_FN void warpweft_obey(const warpweft_executor &x) {
    warpweft_share *s = x.share;
    warpweft_header h = s->header;
    warpweft_insert order, *insert = &order;
    if (h.kind == WARPWEFT_INSERT && h.length >= sizeof order) memcpy(&order, s->payload, sizeof order);
    uint32_t token = h.correlation;
    bool begins = h.kind == WARPWEFT_INSERT && h.length >= sizeof(warpweft_insert) && insert->slot < x.config->slots;
    if (begins) {
        uint8_t *state = x.base + insert->memory;
        for (uint64_t i = x.lane; i < (insert->size + 3) / 4; i += WARPWEFT_THREADS) warpweft_set_word(state + 4 * i, 0);
    }
    warpweft_sync();
    if (x.lane != 0) return;
    if (begins) {
        warpweft_actor *a = x.actor(insert->slot);
        uint64_t is_busy = a->is_busy, next_busy = a->next_busy, is_untold = a->is_untold, next_untold = a->next_untold;
        *a = warpweft_actor{};
        a->is_busy = (uint32_t)is_busy, a->next_busy = (uint32_t)next_busy;
        a->is_untold = (uint32_t)is_untold, a->next_untold = (uint32_t)next_untold;
        a->id = h.destination;
        a->state = WARPWEFT_SERVING;
        a->code = insert->code;
        a->threads = insert->threads;
        a->capacity = insert->capacity;
        a->rejects = insert->rejects;
        a->within_ns = insert->within_ns;
        a->memory = insert->memory;
        a->size = insert->size;
        a->kinds = insert->kinds < WARPWEFT_KINDS ? insert->kinds : (uint32_t)WARPWEFT_KINDS;
        for (uint32_t i = 0; i < a->kinds; i++) a->kind[i] = insert->kind[i], a->kind_size[i] = insert->kind_size[i];
        warpweft_tell_counters(x, insert->slot);
        return warpweft_done(x, token, 0);
    }
    if (h.kind == WARPWEFT_INSPECT) warpweft_inspect(x);
    // The slot stands where a message has its source.
    warpweft_actor *a = h.source < x.config->slots ? x.actor(h.source) : nullptr;
    bool is_here = a && a->id == h.destination && a->state != WARPWEFT_VACANT;
    if (is_here && h.kind == WARPWEFT_STOP && a->state == WARPWEFT_SERVING) a->state = WARPWEFT_STOPPED;
    if (is_here && h.kind == WARPWEFT_RESUME && a->state == WARPWEFT_STOPPED) {
        a->state = WARPWEFT_SERVING;
        warpweft_set_busy(x, h.source);
    }
    if (is_here && h.kind == WARPWEFT_END) {
        a->state = WARPWEFT_ENDING;
        a->reason = h.sequence;
        a->token = token;
        return warpweft_set_busy(x, h.source);
    }
    warpweft_done(x, token, 0);
}

// ---- Lanes that are read

// Reads the next message of a lane into `share`, if it is there whole.
WARPWEFT_FN bool warpweft_read(const warpweft_executor &x, uint32_t source, uint32_t of_class) {
    warpweft_share *s = x.share;
    warpweft_input *in = x.input(source, of_class);
    const warpweft_line *lines = x.ring(x.number, source, of_class);
    uint32_t shift = (uint32_t)x.config->shift, prefix = source == x.config->all;
    uint32_t head_lines = prefix + WARPWEFT_HEADER_LINES;
    uint32_t first = WARPWEFT_THREADS > head_lines ? (uint32_t)WARPWEFT_THREADS : head_lines;
    uint64_t mask = (1ull << shift) - 1, head = in->head;
    bool is_valid = true;
    uint32_t valid = 0; // of a warp, one bit for each of the first lines
    for (uint32_t i = x.lane; i < first; i += WARPWEFT_THREADS) {
        warpweft_words w = warpweft_load(&lines[(head + i) & mask]);
        bool is = w.w[3] == warpweft_stamp(head + i, shift);
        is_valid = is_valid && is;
        valid = WARPWEFT_THREADS > 1 ? warpweft_ballot(is) : is_valid ? 0xffffffffu : 0u;
        for (uint32_t k = 0; k < 3; k++) {
            if (i < head_lines) s->words[3 * (i + 1 - prefix) + k] = w.w[k];
            else warpweft_set_word(s->near + 4 * (3 * (i - head_lines) + k), w.w[k]);
        }
    }
    warpweft_sync();
    uint32_t of_header = (1u << head_lines) - 1;
    if ((valid & of_header) != of_header) return false;
    warpweft_header header = warpweft_unpack(s->words + 3);
    uint32_t length = header.length, total = prefix + warpweft_lines(length);
    // Nobody of ours writes such; whoever did must not lead the reader out of its memory.
    if (length > WARPWEFT_MAX_PAYLOAD || total > 1ull << shift || header.priority >= WARPWEFT_PRIORITIES) {
        if (x.lane == 0 && !x.own->is_damaged) {
            x.own->is_damaged = 1;
            warpweft_tell(x, WARPWEFT_DAMAGED, source, of_class, header);
        }
        return false;
    }
    uint32_t of_first = total < 32 ? (1u << total) - 1 : 0xffffffffu;
    if ((valid & of_first) != of_first) return false;
    uint8_t *to = s->near;
    if (total > first) {
        if (length > WARPWEFT_NEAR) {
            to = x.mine + x.config->scratch;
            for (uint32_t i = x.lane; i < (first - head_lines) * 3; i += WARPWEFT_THREADS)
                warpweft_set_word(to + 4 * i, warpweft_word(s->near + 4 * i));
        }
        bool whole = true;
        for (uint32_t i = first + x.lane; i < total; i += WARPWEFT_THREADS) {
            warpweft_words w = warpweft_load(&lines[(head + i) & mask]);
            whole = whole && w.w[3] == warpweft_stamp(head + i, shift);
            for (uint32_t k = 0; k < 3; k++) warpweft_set_word(to + 4 * (3 * (i - head_lines) + k), w.w[k]);
        }
        if (warpweft_ballot(!whole) != 0) return false;
    }
    warpweft_sync();
    if (x.lane == 0) {
        s->header = header;
        s->payload = to;
        s->flags = source == x.config->all ? WARPWEFT_FROM_HOST : 0;
        in->head = head + total;
    }
    warpweft_sync();
    return true;
}

// Gives back what was read.
WARPWEFT_FN void warpweft_return(const warpweft_executor &x, uint32_t source, uint32_t of_class) {
    warpweft_input *in = x.input(source, of_class);
    if (in->returned == in->head) return;
    in->returned = in->head;
    warpweft_counter *credit = source == x.config->all
                                   ? x.host_word(x.config->host_returned, x.index * WARPWEFT_CLASSES + of_class)
                                   : x.credit(source, x.number, of_class);
    warpweft_give(credit, in->head);
}

// Whether the first line of the next message is there.
WARPWEFT_FN bool warpweft_is_there(const warpweft_executor &x, uint32_t source, uint32_t of_class) {
    uint64_t head = x.input(source, of_class)->head, mask = (1ull << x.config->shift) - 1;
    warpweft_words w = warpweft_load(&x.ring(x.number, source, of_class)[head & mask]);
    return w.w[3] == warpweft_stamp(head, (uint32_t)x.config->shift);
}

WARPWEFT_FN void warpweft_orders(const warpweft_executor &x) {
    uint32_t source = (uint32_t)x.config->all;
    for (uint32_t i = 0; i < WARPWEFT_BATCH; i++) {
        // All threads go by what the first has seen.
        if (!warpweft_first(x.lane == 0 && warpweft_host_takes(x, 4 * WARPWEFT_TOLD + WARPWEFT_LETTERS))) break;
        if (!warpweft_read(x, source, 0)) break;
        warpweft_obey(x);
        warpweft_sync();
    }
    if (x.lane == 0) warpweft_return(x, source, 0);
    warpweft_sync();
}

// Takes messages of one lane, a few.
WARPWEFT_FN void warpweft_take_some(const warpweft_executor &x, uint32_t source, uint32_t of_class) {
    warpweft_input *in = x.input(source, of_class);
    for (uint32_t i = 0; i < WARPWEFT_BATCH; i++) {
        bool may = x.lane == 0 && warpweft_has_pieces(x, WARPWEFT_RESERVE);
        may = may && warpweft_host_takes(x, 2 * WARPWEFT_LETTERS);
        if (!warpweft_first(may) || !warpweft_read(x, source, of_class)) return;
        uint32_t action = warpweft_first(x.lane == 0 ? warpweft_receive(x, true) : 0);
        if (action == WARPWEFT_SERVE) warpweft_serve(x, 0);
        else if (action == WARPWEFT_PASS) warpweft_pass(x);
        else if (action == WARPWEFT_KEEP) warpweft_into_pieces(x);
        warpweft_sync();
        if (x.lane == 0 && in->head - in->returned >= (1ull << x.config->shift) / 4)
            warpweft_return(x, source, of_class);
        warpweft_sync();
    }
}

// Takes orders and messages of all lanes, the urgent first: the threads look at a source each, and at all of its lanes at
// once, since a look takes far longer than what is done with it.
WARPWEFT_FN void warpweft_take(const warpweft_executor &x) {
    uint32_t host = (uint32_t)x.config->all;
    for (uint32_t base = 0; base <= host; base += WARPWEFT_THREADS) {
        uint32_t source = base + x.lane, there = 0;
        bool is_source = source <= host && source != x.number;
#ifdef __CUDACC__
#pragma unroll
#endif
        for (uint32_t of_class = 0; of_class < WARPWEFT_CLASSES; of_class++)
            if (is_source && (of_class > 0 || source == host) && warpweft_is_there(x, source, of_class))
                there |= 1u << of_class;
        for (uint32_t of_class = 1; of_class < WARPWEFT_CLASSES; of_class++)
            if (is_source && !(there >> of_class & 1)) warpweft_return(x, source, of_class);
        for (uint32_t of_class = 0; of_class < WARPWEFT_CLASSES; of_class++) {
            uint32_t ready = warpweft_ballot(there >> of_class & 1);
            for (uint32_t bit = 0; bit < WARPWEFT_THREADS && ready >> bit != 0; bit++) {
                if (!(ready >> bit & 1)) continue;
                if (of_class == 0) warpweft_orders(x);
                else warpweft_take_some(x, base + bit, of_class);
            }
        }
        warpweft_sync();
    }
}

// ---- The bridge

WARPWEFT_FN warpweft_passing *warpweft_passing_of(const warpweft_executor &x, uint32_t of_class) {
    return (warpweft_passing *)(x.base + x.config->bridge) + of_class;
}

// How much was handed on to an executor.
WARPWEFT_FN uint64_t *warpweft_handed(const warpweft_executor &x, uint32_t to, uint32_t of_class) {
    return (uint64_t *)(x.base + x.config->bridge + 256) + to * WARPWEFT_CLASSES + of_class;
}

// An order to the bridge itself, in `share->words`: where it goes, its header, and 16 bytes.
WARPWEFT_FN void warpweft_bridge_obey(const warpweft_executor &x) {
    const uint32_t *args = x.share->words + 12;
    warpweft_header h = warpweft_unpack(x.share->words + 3);
    if (h.kind == WARPWEFT_TABLE && h.destination < x.config->actors) {
        // What was handed on to executors before is there for whoever finds the entry.
        warpweft_fence();
        warpweft_store((warpweft_line *)(x.base + x.config->table) + h.destination, {{args[0], args[1], args[2], args[3]}});
        warpweft_fence();
    }
    uint64_t value = args[0] | (uint64_t)args[1] << 32;
    if (h.kind == WARPWEFT_SET_CLOCK) warpweft_give((warpweft_counter *)(x.base + x.config->clock), value);
    warpweft_done(x, h.correlation, h.kind == WARPWEFT_CLOCK ? warpweft_now() : 0);
}

// Hands on what the host has sent of one class, as far as it is there; whether there was something.
WARPWEFT_FN bool warpweft_bridge_pass(const warpweft_executor &x, uint32_t of_class) {
    // Lines of an order to the bridge: where it goes, a header, and 16 bytes.
    enum { ORDER = 6 };
    warpweft_share *s = x.share;
    warpweft_passing *p = warpweft_passing_of(x, of_class);
    uint32_t shift = (uint32_t)x.config->host_shift;
    const warpweft_line *lines = (const warpweft_line *)(x.host + x.config->host_rings) + ((uint64_t)of_class << shift);
    uint64_t mask = (1ull << shift) - 1, head = p->head;
    uint32_t at = x.lane, valid = 0, look = WARPWEFT_THREADS > 1 ? (uint32_t)WARPWEFT_THREADS : (uint32_t)ORDER;
    warpweft_words mine = {{0, 0, 0, 0}};
    for (uint32_t i = x.lane; i < look; i += WARPWEFT_THREADS) {
        warpweft_words w = warpweft_load(&lines[(head + i) & mask]);
        bool is = w.w[3] == warpweft_stamp(head + i, shift);
        if (WARPWEFT_THREADS > 1) valid = warpweft_ballot(is);
        else if (is && valid == (1u << i) - 1) valid |= 1u << i;
        for (uint32_t k = 0; i < ORDER && k < 3; k++) s->words[3 * i + k] = w.w[k];
        if (i == at) mine = w;
    }
    warpweft_sync();
    uint32_t count = 0;
    while (count < look && valid >> count & 1) {
        count++;
        if (count == 32) break;
    }
    if (p->left == 0) {
        if (count < 1 + WARPWEFT_HEADER_LINES) return false;
        warpweft_header h = warpweft_unpack(s->words + 3);
        uint32_t to = s->words[0], total = 1 + warpweft_lines(h.length);
        if (to == (uint32_t)WARPWEFT_TO_BRIDGE) {
            if (total > ORDER || count < total) return false;
            if (!warpweft_first(x.lane == 0 && warpweft_host_takes(x, WARPWEFT_LETTERS))) return false;
            if (x.lane == 0) {
                warpweft_bridge_obey(x);
                p->head = head + total;
            }
            warpweft_sync();
            return true;
        }
        warpweft_sync();
        if (x.lane == 0) {
            p->left = total;
            p->target = to < x.config->executors ? to : 0;
            p->tail = *warpweft_handed(x, p->target, of_class);
        }
        warpweft_sync();
    }
    // The host has seen to it that there is room.
    uint32_t target = p->target, to_shift = (uint32_t)x.config->shift, some = count < p->left ? count : p->left;
    if (some > WARPWEFT_THREADS) some = WARPWEFT_THREADS;
    if (some == 0) return false;
    warpweft_line *to = x.ring((uint32_t)x.config->first + target, (uint32_t)x.config->all, of_class);
    uint64_t position = p->tail + at;
    if (at < some)
        warpweft_store(&to[position & ((1ull << to_shift) - 1)],
                       {{mine.w[0], mine.w[1], mine.w[2], warpweft_stamp(position, to_shift)}});
    warpweft_sync();
    if (x.lane == 0) {
        p->head = head + some;
        p->tail += some;
        p->left -= some;
        *warpweft_handed(x, target, of_class) = p->tail;
    }
    warpweft_sync();
    return true;
}

WARPWEFT_APART void warpweft_bridge_round(const warpweft_executor &x) {
    uint32_t shift = (uint32_t)x.config->host_shift, ready = 0;
    // One look at all classes: memory of the host is far away.
    for (uint32_t base = 0; base < WARPWEFT_CLASSES; base += WARPWEFT_THREADS) {
        uint32_t of_class = base + x.lane;
        bool is = false;
        if (of_class < WARPWEFT_CLASSES) {
            const warpweft_line *lines = (const warpweft_line *)(x.host + x.config->host_rings);
            uint64_t head = warpweft_passing_of(x, of_class)->head;
            uint64_t at = ((uint64_t)of_class << shift) + (head & ((1ull << shift) - 1));
            is = warpweft_load(&lines[at]).w[3] == warpweft_stamp(head, shift);
        }
        ready |= warpweft_ballot(is) << base;
    }
    for (uint32_t of_class = 0; of_class < WARPWEFT_CLASSES; of_class++) {
        bool more = ready >> of_class & 1;
        for (uint32_t i = 0; more && i < 1024; i++) more = warpweft_bridge_pass(x, of_class);
        warpweft_passing *p = warpweft_passing_of(x, of_class);
        if (x.lane == 0 && p->returned != p->head) {
            p->returned = p->head;
            warpweft_give(x.host_word(x.config->host_credits, of_class), p->head);
        }
        warpweft_sync();
    }
    uint64_t now = warpweft_now();
    if (x.lane != 0 || now - x.own->told_ns < WARPWEFT_TELL_NS) return;
    x.own->told_ns = now;
    for (uint32_t i = 0; i < x.config->executors; i++) {
        uint64_t beat = warpweft_look((warpweft_counter *)(x.base + x.config->beats) + i);
        warpweft_give(x.host_word(x.config->host_beats, i), beat);
    }
}

// ---- Rounds

// The executor with this index; the bridge comes behind the last.
WARPWEFT_FN warpweft_executor warpweft_begin(warpweft_share *share, uint8_t *host, uint32_t device, uint32_t index) {
    warpweft_executor x;
    x.share = share;
    x.host = host;
    x.base = share->device[device];
    x.config = (const warpweft_config *)x.base;
    x.index = index;
    x.number = (uint32_t)x.config->first + x.index;
    x.mine = x.base + x.config->own + x.config->own_stride * x.index;
    x.own = (warpweft_own *)x.mine;
    x.lane = warpweft_lane();
    return x;
}

WARPWEFT_FN void warpweft_round(const warpweft_executor &x) {
    if (x.index == x.config->executors) return warpweft_bridge_round(x);
    if (x.lane == 0) {
        x.own->round++;
        warpweft_tell_all(x);
    }
    warpweft_sync();
    if (x.own->is_damaged) return;
    if (x.own->blocked.first != 0) warpweft_unblock(x);
    warpweft_go_on(x);
    warpweft_take(x);
}

#ifdef __CUDACC__

extern "C" __global__ void __launch_bounds__(32, 1)
    warpweft_actors(ww_slice slice, uint8_t *host, uint8_t *d0, uint8_t *d1, uint8_t *d2, uint8_t *d3, uint8_t *d4,
                    uint8_t *d5, uint8_t *d6, uint8_t *d7, uint32_t device, uint32_t first) {
    __shared__ warpweft_share share;
    ww_turn turn;
    bool leaves = false;
    if (threadIdx.x == 0) {
        uint8_t *all[WARPWEFT_DEVICES] = {d0, d1, d2, d3, d4, d5, d6, d7};
#pragma unroll
        for (int i = 0; i < WARPWEFT_DEVICES; i++) share.device[i] = all[i];
        leaves = !ww_begin(slice, turn);
    }
    warpweft_sync();
    warpweft_executor x = warpweft_begin(&share, host, device, first + blockIdx.x);
    while (warpweft_ballot(leaves) == 0) {
        warpweft_round(x);
        warpweft_sync();
        if (threadIdx.x == 0) leaves = ww_should_yield(slice, turn);
    }
    if (threadIdx.x == 0) ww_end(slice, false);
}

#else

// What a stand-in for a device tells a kernel of a library: the bytes of each argument, which block this is, and of how
// many. It is called for one round after the other.
struct warpweft_turn {
    const void *const *arguments;
    uint64_t index, blocks, threads;
};

WARPWEFT_FN int32_t warpweft_turn_of(const warpweft_turn *turn, warpweft_share *share) {
    uint8_t *host;
    uint32_t device, first;
    memcpy(&host, turn->arguments[1], sizeof host);
    for (uint32_t i = 0; i < WARPWEFT_DEVICES; i++) memcpy(&share->device[i], turn->arguments[2 + i], sizeof(uint8_t *));
    memcpy(&device, turn->arguments[2 + WARPWEFT_DEVICES], sizeof device);
    memcpy(&first, turn->arguments[3 + WARPWEFT_DEVICES], sizeof first);
    try {
        warpweft_round(warpweft_begin(share, host, device, first + (uint32_t)turn->index));
    } catch (...) {
        return -1;
    }
    return 0;
}

#ifdef WARPWEFT_WARP
#define WARPWEFT_LIBRARY
#else
#define WARPWEFT_LIBRARY                                                                                               \
    extern "C" int32_t warpweft_actors(const warpweft_turn *turn) {                                                    \
        warpweft_share share;                                                                                          \
        return warpweft_turn_of(turn, &share);                                                                         \
    }
#endif

#endif
