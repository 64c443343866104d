// A warp for the CPU: 32 threads of execution that take turns and meet where a warp of a GPU meets. A thread that meets
// the others elsewhere, or not at all, ends the program with a word: on a GPU it would hang.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>

struct fibers {
    enum { COUNT = 32, STACK = 256 << 10 };
    ucontext_t back, own[COUNT];
    std::unique_ptr<char[]> stacks{new char[(size_t)COUNT * STACK]};
    int met[COUNT]; // the line where each waits for the others; 0 once it has ended
    bool ended[COUNT];
    uint32_t now, votes, order, said;
    int32_t (*body)(const void *);
    const void *argument;
    int32_t result;
};

static thread_local fibers *warp;

static void fiber_main() {
    int32_t result = warp->body(warp->argument);
    if (result != 0) warp->result = result;
    warp->ended[warp->now] = true;
    warp->met[warp->now] = 0;
    swapcontext(&warp->own[warp->now], &warp->back);
}

static void meet(int line) {
    fibers *own = warp;
    own->met[own->now] = line;
    swapcontext(&own->own[own->now], &own->back);
}

// Runs a body by all threads of the warp.
static int32_t run_warp(int32_t (*body)(const void *), const void *argument) {
    static thread_local std::unique_ptr<fibers> kept;
    if (!kept) kept = std::make_unique<fibers>();
    fibers *own = warp = kept.get();
    own->body = body;
    own->argument = argument;
    own->result = 0;
    for (uint32_t i = 0; i < fibers::COUNT; i++) {
        getcontext(&own->own[i]);
        own->own[i].uc_stack = {&own->stacks[(size_t)i * fibers::STACK], 0, fibers::STACK};
        own->own[i].uc_link = nullptr;
        makecontext(&own->own[i], fiber_main, 0);
        own->ended[i] = false;
    }
    for (;;) {
        // From the first thread to the last, and then the other way: nothing may depend on it.
        own->order++;
        for (uint32_t i = 0; i < fibers::COUNT; i++) {
            own->now = own->order & 1 ? fibers::COUNT - 1 - i : i;
            swapcontext(&own->back, &own->own[own->now]);
        }
        for (uint32_t i = 1; i < fibers::COUNT; i++)
            if (own->met[i] != own->met[0] || own->ended[i] != own->ended[0]) {
                // A thread that has failed takes the others with it.
                if (own->result != 0) return own->result;
                std::fprintf(stderr, "threads 0 and %u of a warp meet in lines %d and %d\n", i, own->met[0], own->met[i]);
                std::abort();
            }
        if (own->ended[0]) return own->result;
    }
}

uint32_t warpweft_lane() { return warp->now; }

void warpweft_sync(int line) { meet(line); }

uint32_t warpweft_ballot(bool is, int line) {
    warp->votes = is ? warp->votes | 1u << warp->now : warp->votes & ~(1u << warp->now);
    meet(line);
    uint32_t votes = warp->votes;
    // Nobody votes again before all have seen it.
    meet(line);
    return votes;
}

uint32_t warpweft_first(uint32_t value, int line) {
    if (warp->now == 0) warp->said = value;
    meet(line);
    uint32_t said = warp->said;
    meet(line);
    return said;
}
