// Multiply-adds per second of one thread: enough independent accumulators to hide the latency, nothing in memory.
// Prints GFLOP/s, the best of several spans.
#include <immintrin.h>
#include <stdio.h>
#include <time.h>

#if defined(__AVX512F__) && !defined(ONLY_AVX2)
typedef __m512 vector;
#define SET _mm512_set1_ps
#define FMA _mm512_fmadd_ps
#else
typedef __m256 vector;
#define SET _mm256_set1_ps
#define FMA _mm256_fmadd_ps
#endif

enum { CHAINS = 12, TURNS = 4000000, LANES = sizeof(vector) / sizeof(float) };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(void) {
    vector x[CHAINS], a = SET(0.999f), b = SET(0.001f);
    double best = 0;
    for (int i = 0; i < CHAINS; i++) x[i] = SET((float)i);
    for (int span = 0; span < 20; span++) {
        double start = now();
        for (int t = 0; t < TURNS; t++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) x[i] = FMA(x[i], a, b);
        double rate = 2e-9 * LANES * CHAINS * TURNS / (now() - start);
        if (rate > best) best = rate;
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; i++) sum += ((float *)&x[i])[0];
    printf("%.1f\n", sum == 0 ? 0 : best);
    return 0;
}
