/* What one or two processors are just now: guests of a host are moved between its cores, and share them.
   Of two, prints how many times as many multiply-adds both do at once as one alone (about 2 on two cores, 1 on one core's two threads), the
   nanoseconds that a cache line takes from one to the other, and the additions per nanosecond of the slower one while both add: fewer where
   another guest has the other thread of its core, whatever that does: threads that both want a core's instructions get every other one. Of
   one, prints its additions alone. Arguments: the processors. With `watch` after them, it looks for half a millisecond at a time, before all
   others (SCHED_FIFO), until its input ends: a line for each look has its time (CLOCK_MONOTONIC, s) and the additions of each. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CHAINS = 12, TURNS = 2000, PASSES = 2000, SPANS = 9 };
static const double SPAN_S = 0.01, LOOK_S = 0.0005, EVERY_S = 0.2, WAKE_S = 0.0002;
static _Alignas(64) atomic_int ball;
static _Alignas(64) atomic_int ready;
static int processor[2], processors;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void pin(int to) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(to, &set);
    if (sched_setaffinity(0, sizeof set, &set)) perror("sched_setaffinity"), exit(1);
}

/* Multiply-adds per second from `start` for a span: chains enough to hide the latency, in 32-byte vectors. */
static double multiply(double start, double span) {
    typedef float vector __attribute__((vector_size(32)));
    vector x[CHAINS], a = {0.999f}, b = {0.001f};
    double done = 0;
    for (int i = 0; i < CHAINS; i++) x[i] = b;
    while (now() < start) {}
    while (now() < start + span) {
        for (int t = 0; t < TURNS; t++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) x[i] = x[i] * a + b;
        done += CHAINS * TURNS;
    }
    volatile float kept = 0;
    for (int i = 0; i < CHAINS; i++) kept += x[i][0];
    return done / (now() - start);
}

/* Additions per nanosecond from `start` for a span: as many chains as a core has units for them, and more. */
static double add(double start, double span) {
    unsigned long x[8] = {0};
    double done = 0;
    while (now() < start) {}
    while (now() < start + span) {
        for (int t = 0; t < TURNS; t++)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                x[i] += i + 1;
                __asm__ volatile("" : "+r"(x[i])); /* one by one */
            }
        done += 8 * TURNS;
    }
    return 1e-9 * done / (now() - start);
}

/* The ball is `me`'s at every other number. */
static void bounce(int me, int span) {
    for (int pass = 2 * PASSES * span + me; pass < 2 * PASSES * (span + 1); pass += 2) {
        while (atomic_load_explicit(&ball, memory_order_acquire) != pass) {}
        atomic_store_explicit(&ball, pass + 1, memory_order_release);
    }
}

static void meet(int times) {
    atomic_fetch_add(&ready, 1);
    while (atomic_load(&ready) < 2 * times) {}
}

static double second_rate, second_added, together, added_from;

static void *second(void *unused) {
    pin(processor[1]);
    meet(1);
    second_rate = multiply(together, SPAN_S);
    for (int span = 0; span < SPANS; span++) meet(2 + span), bounce(1, span);
    meet(2 + SPANS);
    second_added = add(added_from, SPAN_S);
    return unused;
}

/* What watches does, thread `me` of one or two: the k-th look is at `together` + k EVERY_S. */
static double rate[2];
static atomic_int looks, over;

static void *look(void *which) {
    int me = which != NULL;
    pin(processor[me]);
    if (sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1})) perror("sched_setscheduler"), exit(3);
    for (int k = 0; !atomic_load(&over); k++) {
        double at = together + k * EVERY_S, wake = at - WAKE_S;
        struct timespec until = {(time_t)wake, (long)(1e9 * (wake - (time_t)wake))};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        rate[me] = now() < at ? add(at, LOOK_S) : 0; /* away when it should have come */
        atomic_fetch_add(&looks, 1);
        if (me) continue;
        int all = processors * (k + 1);
        while (atomic_load(&looks) < all && now() < at + 4 * LOOK_S) {}
        printf("%.6f %.3f", at, rate[0]);
        if (processors > 1) printf(" %.3f", atomic_load(&looks) == all ? rate[1] : 0);
        printf("\n"), fflush(stdout);
        atomic_store(&over, poll(&(struct pollfd){.fd = STDIN_FILENO, .events = POLLIN}, 1, 0) != 0);
    }
    return which;
}

static int watch(void) {
    pthread_t thread;
    together = now() + SPAN_S;
    if (processors > 1 && pthread_create(&thread, NULL, look, &ready)) return perror("pthread_create"), 1;
    look(NULL);
    if (processors > 1) pthread_join(thread, NULL);
    return 0;
}

int main(int count, char **words) {
    int watches = count > 2 && !strcmp(words[count - 1], "watch");
    processors = count - 1 - watches;
    if (processors != 1 && processors != 2) return fprintf(stderr, "usage: cores FIRST [SECOND] [watch]\n"), 2;
    for (int i = 0; i < processors; i++) processor[i] = atoi(words[i + 1]);
    if (watches) return watch();
    pin(processor[0]);
    if (processors == 1) return printf("%.3f\n", add(now(), SPAN_S)), 0;
    multiply(now(), SPAN_S); /* wakes the vector units */
    double alone = multiply(now(), SPAN_S);
    together = now() + SPAN_S;
    pthread_t thread;
    if (pthread_create(&thread, NULL, second, NULL)) return perror("pthread_create"), 1;
    meet(1);
    double both = multiply(together, SPAN_S), best = 1;
    for (int span = 0; span < SPANS; span++) {
        meet(2 + span);
        double start = now();
        bounce(0, span);
        double took = now() - start;
        if (took < best) best = took;
    }
    added_from = now() + SPAN_S / 10;
    meet(2 + SPANS);
    double added = add(added_from, SPAN_S);
    pthread_join(thread, NULL);
    if (second_added < added) added = second_added;
    printf("%.2f %.0f %.2f\n", (both + second_rate) / alone, 1e9 * best / (2 * PASSES), added);
    return 0;
}
