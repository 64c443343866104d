// The lane header on the CPU. `trace` plays pushes and pops that it reads and prints what became of each and what the
// memory holds then; `threads` has producers and a consumer run at once and checks every byte.
#include "../kernels/warpweft_lanes.cuh"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

static uint8_t byte_of(uint32_t sequence, uint32_t at) { return (uint8_t)(sequence * 31u + at); }

static void fail(const char *what) {
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

struct lane {
    std::vector<warpweft_line> lines;
    warpweft_counter credit{0}, tickets{0};
    uint32_t shift;
    explicit lane(uint32_t shift) : lines(1u << shift), shift(shift) {
        for (auto &line : lines) line.low = 0, line.high = 0;
    }
    warpweft_producer producer(bool shared) { return {lines.data(), &credit, shared ? &tickets : nullptr, 0, 0, shift}; }
    warpweft_consumer consumer() { return {lines.data(), &credit, 0, 0, shift}; }
};

static int trace(uint32_t shift, bool shared) {
    lane l(shift);
    auto p = l.producer(shared);
    auto c = l.consumer();
    std::vector<uint8_t> payload(WARPWEFT_MAX_PAYLOAD + 16);
    char play;
    uint32_t sequence, length;
    while (std::scanf(" %c %u %u", &play, &sequence, &length) == 3) {
        if (play == 'p') {
            warpweft_header h{};
            h.destination = sequence ^ 5, h.length = length, h.sequence = sequence, h.kind = ~sequence;
            h.generation = (uint16_t)sequence, h.priority = sequence % 3, h.hops = sequence % 9, h.flags = sequence % 4;
            for (uint32_t i = 0; i < length && i < payload.size(); i++) payload[i] = byte_of(sequence, i);
            std::printf("p %d\n", (int)warpweft_try_push(&p, h, payload.data()));
        } else {
            warpweft_header h{};
            bool popped = warpweft_try_pop(&c, &h, payload.data());
            std::printf("g %d %u %u\n", (int)popped, popped ? h.sequence : 0, popped ? h.length : 0);
        }
    }
    std::printf("c %llu\n", (unsigned long long)l.credit.load());
    for (auto &line : l.lines)
        std::printf("%016llx %016llx\n", (unsigned long long)line.low.load(), (unsigned long long)line.high.load());
    return 0;
}

static int threads(uint32_t producers, uint32_t each) {
    lane l(6);
    std::vector<std::thread> all;
    auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    auto in_time = [&] {
        if (std::chrono::steady_clock::now() > limit) fail("the lane stands still");
        std::this_thread::yield();
    };
    for (uint32_t source = 0; source < producers; source++)
        all.emplace_back([&, source] {
            auto p = l.producer(producers > 1);
            std::vector<uint8_t> payload(64);
            for (uint32_t sequence = 0; sequence < each; sequence++) {
                warpweft_header h{};
                h.source = source, h.sequence = sequence, h.length = sequence % 50;
                for (uint32_t i = 0; i < h.length; i++) payload[i] = byte_of(sequence, i);
                while (warpweft_try_push(&p, h, payload.data()) != WARPWEFT_SENT) in_time();
            }
        });
    auto c = l.consumer();
    std::vector<uint32_t> next(producers);
    std::vector<uint8_t> payload(WARPWEFT_MAX_PAYLOAD);
    for (uint64_t left = (uint64_t)producers * each; left > 0;) {
        warpweft_header h;
        if (!warpweft_try_pop(&c, &h, payload.data())) {
            in_time();
            continue;
        }
        left--;
        if (h.source >= producers || h.sequence != next[h.source]++ || h.length != h.sequence % 50)
            fail("a message is lost, doubled or out of order");
        for (uint32_t i = 0; i < h.length; i++)
            if (payload[i] != byte_of(h.sequence, i)) fail("a payload is wrong");
    }
    for (auto &thread : all) thread.join();
    std::printf("%llu\n", (unsigned long long)producers * each);
    return 0;
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    uint32_t first = (uint32_t)std::stoul(arguments[2]), second = (uint32_t)std::stoul(arguments[3]);
    return std::string(arguments[1]) == "trace" ? trace(first, second != 0) : threads(first, second);
}
