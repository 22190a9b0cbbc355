// CUDA's words for g++: what generated kernels are compiled with to run on a CPU, in tests.
//
// A block's threads are fibers of one thread of the system, run one at a time in an order that a seed shuffles. A fiber runs until it
// waits: at a barrier for all of its block, at a warp's exchange for all of its warp. A warp runs as far as it comes before another
// does, and blocks follow one another. What this finds: wrong results, threads that miss a barrier or an exchange or wait at different
// ones, (by a shuffled order) most missing barriers, within a warp too, and what is read of shared memory before it is written, which is
// NaN; with AddressSanitizer, accesses outside of an allocation or a shared array. What it cannot: races between blocks, bank conflicts,
// speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define DCC_EMULATED 1
#define DCC_SHARED(T, name) T* name = (T*)emulated::now().shared
// Blocks follow one another, so one place each will do: of its own on the heap, where AddressSanitizer sees its ends.
#define DCC_SHARED_ARRAY(T, name, ...)                      \
    typedef T name##_array __VA_ARGS__;                     \
    static emulated::SharedArray<name##_array> name##_kept; \
    name##_array& name = name##_kept.of_block()

namespace emulated {
struct Index { unsigned x, y, z; };

// What the running fiber is and how it waits; the library of the device has them.
struct Running {
    Index thread, block, threads, blocks;
    // Of the block, from 1, among all that ran.
    uint64_t number;
    // Waits for all threads at the barrier that stands at `place`.
    void (*barrier)(int place);
    // Exchanges 8 bytes with lane `from` of the warp (or of `mask`).
    uint64_t (*exchange)(unsigned mask, uint64_t value, int from);
    unsigned (*ballot)(unsigned mask, bool vote);
    // Dynamic shared memory of the block.
    unsigned char* shared;
};
// A kernel as the driver knows it, the most dynamic shared memory that it may be given, and bytes of its arguments, behind them 0.
struct Function {
    void (*call)(void**);
    unsigned shared = 48 << 10;
    int (*bytes)(int) = nullptr;
};
}  // namespace emulated
// Set by the library of the device when it loads a module; a program that is linked with it sets it from `emulated_device`.
extern "C" {
emulated::Running* emulated_device();
emulated::Running* emulated_state = nullptr;
}
namespace emulated {
inline Running& now() { return *emulated_state; }

// NaN for the first thread of each block that comes by.
template <class T>
struct SharedArray {
    void* at = nullptr;
    uint64_t block = 0;
    T& of_block() {
        if (!at && posix_memalign(&at, 128, sizeof(T))) abort();
        if (block != now().number) memset(at, 0xff, sizeof(T));
        block = now().number;
        return *(T*)at;
    }
};

template <class T>
inline T exchanged(unsigned mask, T x, int from) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    bits = now().exchange(mask, bits, from);
    memcpy(&x, &bits, sizeof x);
    return x;
}
}  // namespace emulated

#define threadIdx (emulated::now().thread)
#define blockIdx (emulated::now().block)
#define blockDim (emulated::now().threads)
#define gridDim (emulated::now().blocks)
#define warpSize 32

#define __syncthreads() emulated::now().barrier(__LINE__)
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::now().ballot(mask, true); }
inline int __syncthreads_or(int vote) {
    static int any;
    any = 0;
    __syncthreads();
    if (vote) any = 1;
    __syncthreads();
    const int result = any;
    __syncthreads();
    return result;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline int emulated_lane() {
    const auto& n = emulated::now();
    return (int)((n.thread.x + n.threads.x * (n.thread.y + n.threads.y * n.thread.z)) % 32);
}
template <class T>
inline T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
    const int lane = emulated_lane();
    return emulated::exchanged(mask, x, lane / width * width + from % width);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int across, int = 32) { return emulated::exchanged(mask, x, emulated_lane() ^ across); }
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, int by, int width = 32) {
    const int lane = emulated_lane();
    return emulated::exchanged(mask, x, lane % width + by < width ? lane + by : lane);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, int by, int width = 32) {
    const int lane = emulated_lane();
    return emulated::exchanged(mask, x, lane % width >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) { return emulated::now().ballot(mask, vote); }
inline bool __any_sync(unsigned mask, bool vote) { return emulated::now().ballot(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return emulated::now().ballot(mask, !vote) == 0; }
inline unsigned __activemask() { return 0xffffffffu; }

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T>
inline T __ldg(const T* at) { return *at; }

// Blocks follow one another and fibers run one at a time: every access is atomic.
template <class T, class X>
inline T atomicAdd(T* at, X x) { T old = *at; *at = old + (T)x; return old; }
template <class T, class X>
inline T atomicMax(T* at, X x) { T old = *at; if ((T)x > old) *at = (T)x; return old; }
template <class T, class X>
inline T atomicExch(T* at, X x) { T old = *at; *at = (T)x; return old; }
template <class T, class X, class Y>
inline T atomicCAS(T* at, X expected, Y x) { T old = *at; if (old == (T)expected) *at = (T)x; return old; }

// What tensor cores and asynchronous copies do.
namespace emulated {
inline unsigned warp_number() { return now().thread.x / 32; }

// Each lane gives the address of a row of one of four 8 x 8 matrices of 2 bytes, and gets its two elements of each.
inline void load_matrices(unsigned (&x)[4], const void* row, bool transposed) {
    static const unsigned short* rows[32][32];
    const auto& own = rows[warp_number()];
    const int lane = emulated_lane(), a = lane / 4, b = lane % 4 * 2;
    rows[warp_number()][lane] = (const unsigned short*)row;
    __syncwarp();
    for (int m = 0; m < 4; ++m) {
        const unsigned low = transposed ? own[m * 8 + b][a] : own[m * 8 + a][b];
        const unsigned high = transposed ? own[m * 8 + b + 1][a] : own[m * 8 + a][b + 1];
        x[m] = low | high << 16;
    }
    __syncwarp();
}

// sums[16, 8] += a[16, 16] b[16, 8], of fragments of mma.m16n8k16.
template <class F>
inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, F value) {
    static unsigned all[32][32][6];
    auto& warp = all[warp_number()];
    const int lane = emulated_lane();
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(warp[lane], own, sizeof own);
    __syncwarp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const unsigned x = warp[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], y = warp[column * 4 + k % 8 / 2][4 + k / 8];
            sums[i] += value((unsigned short)(x >> k % 2 * 16)) * value((unsigned short)(y >> k % 2 * 16));
        }
    }
    __syncwarp();
}

// Copies of 16 bytes happen when they are waited for; until then there is NaN.
struct Copies {
    struct Copy { void* to; const void* from; };
    Copy all[256];
    int begin = 0, end = 0, ends[64], first_group = 0, groups = 0;
};
inline Copies& copies() {
    static Copies* all = new Copies[1024];
    return all[now().thread.x];
}
inline void copy(void* to, const void* from, bool there) {
    Copies& own = copies();
    memset(to, 0xff, 16);
    own.all[own.end++ % 256] = {to, there ? from : nullptr};
    if (own.end - own.begin > 256) abort();
}
inline void commit() {
    Copies& own = copies();
    own.ends[own.groups++ % 64] = own.end;
}
inline void wait(int left) {
    Copies& own = copies();
    for (; own.groups - own.first_group > left; ++own.first_group)
        for (; own.begin < own.ends[own.first_group % 64]; ++own.begin) {
            const Copies::Copy copy = own.all[own.begin % 256];
            if (copy.from) memcpy(copy.to, copy.from, 16);
            else memset(copy.to, 0, 16);
        }
}
}  // namespace emulated

// Calls a kernel with arguments as the driver gives them: a pointer to each.
namespace emulated {
template <int... N> struct Numbers {};
template <int N, int... M> struct Count : Count<N - 1, N - 1, M...> {};
template <int... M> struct Count<0, M...> { using Type = Numbers<M...>; };
template <class... A, int... N>
inline void call(void (*kernel)(A...), void** arguments, Numbers<N...>) { kernel(*(A*)arguments[N]...); }
template <class... A>
inline void call(void (*kernel)(A...), void** arguments) { call(kernel, arguments, typename Count<sizeof...(A)>::Type()); }
template <class... A>
inline int bytes(void (*)(A...), int n) {
    // Not static: modules would share it, whose types of one name differ.
    const int all[] = {(int)sizeof(A)..., 0};
    return all[n];
}
}  // namespace emulated
#define EMULATED_ENTRY(name)                                                                         \
    extern "C" void emulated_call_##name(void** arguments) { emulated::call(name, arguments); } \
    extern "C" int emulated_bytes_##name(int n) { return emulated::bytes(name, n); }
