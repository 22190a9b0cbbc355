// What generated kernels stand on. NVRTC has no headers of its own and needs none: this text and a kernel's are all.
// Values are computed as float (of f16, bf16 and f32), double, long long (of all integers, wrapping) and bool.

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

// Shared memory: dynamic, as much as the launch says, and an array. Nothing is in either before it is written.
#ifndef DCC_EMULATED
#define DCC_SHARED(T, name)                                    \
    extern __shared__ __align__(128) unsigned char dcc_shared[]; \
    T* name = (T*)dcc_shared
#define DCC_SHARED_ARRAY(T, name, ...) __shared__ __align__(16) T name __VA_ARGS__
#endif

// N elements that one instruction moves.
template <class T, int N>
struct alignas(sizeof(T) * N) pack { T x[N]; };

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __int_as_float(0x7fc00000); }

// Stored to computed.
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline bool widen(bool x) { return x; }
__device__ inline long long widen(signed char x) { return x; }
__device__ inline long long widen(short x) { return x; }
__device__ inline long long widen(int x) { return x; }
__device__ inline long long widen(long long x) { return x; }
__device__ inline long long widen(unsigned char x) { return x; }
__device__ inline long long widen(unsigned short x) { return x; }
__device__ inline long long widen(unsigned int x) { return x; }
__device__ inline long long widen(unsigned long long x) { return (long long)x; }
__device__ inline float widen(bf16 x) { return __int_as_float((int)((unsigned)x.bits << 16)); }
#ifndef DCC_EMULATED
__device__ inline float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
#else
__device__ inline float widen(f16 x) {
    const unsigned sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
    if (exponent == 0) {
        const float tiny = (float)mantissa * 5.9604645e-8f;
        return sign ? -tiny : tiny;
    }
    return __int_as_float((int)(sign | (exponent == 31 ? 0x7f800000u : exponent + 112 << 23) | mantissa << 13));
}
#endif

// Computed to stored: integers wrap, floats round to nearest even.
template <class T>
struct Narrow {
    template <class X>
    __device__ static T of(X x) { return (T)x; }
};
#ifndef DCC_EMULATED
template <>
struct Narrow<bf16> {
    __device__ static bf16 of(float x) {
        unsigned short bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return bf16{bits};
    }
};
template <>
struct Narrow<f16> {
    __device__ static f16 of(float x) {
        unsigned short bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return f16{bits};
    }
};
#else
template <>
struct Narrow<bf16> {
    __device__ static bf16 of(float x) {
        const unsigned bits = (unsigned)__float_as_int(x);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return bf16{(unsigned short)(nan ? bits >> 16 | 0x40 : bits + 0x7fff + (bits >> 16 & 1) >> 16)};
    }
};
template <>
struct Narrow<f16> {
    __device__ static f16 of(float x) {
        const unsigned all = (unsigned)__float_as_int(x), sign = all >> 16 & 0x8000u, bits = all & 0x7fffffffu;
        unsigned short magnitude;
        if (bits > 0x7f800000u) magnitude = 0x7e00;
        else if (bits >= 0x477ff000u) magnitude = 0x7c00;
        // Below 2^-14 the sum with 0.5 leaves the half's digits, rounded, in the low bits.
        else if (bits < 0x38800000u) magnitude = (unsigned short)(__float_as_int(__int_as_float((int)bits) + 0.5f) - 0x3f000000);
        else magnitude = (unsigned short)(bits + 0xfff + (bits >> 13 & 1) - (112u << 23) >> 13);
        return f16{(unsigned short)(sign | magnitude)};
    }
};
#endif
template <class T, class X>
__device__ inline T narrow(X x) { return Narrow<T>::of(x); }

namespace op {
__device__ inline long long add(long long x, long long y) { return (long long)((unsigned long long)x + (unsigned long long)y); }
__device__ inline long long sub(long long x, long long y) { return (long long)((unsigned long long)x - (unsigned long long)y); }
__device__ inline long long mul(long long x, long long y) { return (long long)((unsigned long long)x * (unsigned long long)y); }
__device__ inline long long neg(long long x) { return sub(0, x); }
__device__ inline long long div(long long x, long long y) { return y == 0 ? 0 : y == -1 ? neg(x) : x / y; }
__device__ inline long long rem(long long x, long long y) { return y == 0 || y == -1 ? 0 : x % y; }
__device__ inline long long abs(long long x) { return x < 0 ? neg(x) : x; }
__device__ inline long long sign(long long x) { return (x > 0) - (x < 0); }
__device__ inline long long max(long long x, long long y) { return x > y ? x : y; }
__device__ inline long long min(long long x, long long y) { return x < y ? x : y; }
__device__ inline long long pow(long long x, long long y) {
    if (y < 0) return x == 1 ? 1 : x == -1 ? 1 - 2 * (y & 1) : 0;
    long long product = 1;
    for (; y > 0; y >>= 1, x = mul(x, x))
        if (y & 1) product = mul(product, x);
    return product;
}
__device__ inline bool add(bool x, bool y) { return x || y; }
__device__ inline bool max(bool x, bool y) { return x || y; }
__device__ inline bool min(bool x, bool y) { return x && y; }

constexpr double SQRT_HALF = 0.70710678118654752, GELU_SCALE = 0.79788456080286536;
// Rounded by themselves: the compiler makes no fused multiply-add of them, which it would or would not by what stands around a statement, so
// that a kernel's statements give the same bits wherever they stand.
__device__ inline float add(float x, float y) { return __fadd_rn(x, y); }
__device__ inline float sub(float x, float y) { return __fsub_rn(x, y); }
__device__ inline float mul(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double add(double x, double y) { return __dadd_rn(x, y); }
__device__ inline double sub(double x, double y) { return __dsub_rn(x, y); }
__device__ inline double mul(double x, double y) { return __dmul_rn(x, y); }
#define DCC_FLOAT(T, S)                                                                              \
    __device__ inline T max(T x, T y) { return x != x ? x : y != y ? y : x > y ? x : y; }            \
    __device__ inline T min(T x, T y) { return x != x ? x : y != y ? y : x < y ? x : y; }            \
    __device__ inline T rem(T x, T y) { return fmod##S(x, y); }                                      \
    __device__ inline T pow(T x, T y) { return ::pow##S(x, y); }                                     \
    __device__ inline T abs(T x) { return fabs##S(x); }                                              \
    __device__ inline T sign(T x) { return x > 0 ? T(1) : x < 0 ? T(-1) : x; }                       \
    __device__ inline T exp(T x) { return ::exp##S(x); }                                             \
    __device__ inline T expm1(T x) { return ::expm1##S(x); }                                         \
    __device__ inline T log(T x) { return ::log##S(x); }                                             \
    __device__ inline T log1p(T x) { return ::log1p##S(x); }                                         \
    __device__ inline T sqrt(T x) { return ::sqrt##S(x); }                                           \
    __device__ inline T rsqrt(T x) { return T(1) / ::sqrt##S(x); }                                   \
    __device__ inline T tanh(T x) { return ::tanh##S(x); }                                           \
    __device__ inline T logistic(T x) { return T(1) / (T(1) + ::exp##S(-x)); }                       \
    __device__ inline T erf(T x) { return ::erf##S(x); }                                             \
    __device__ inline T gelu(T x) { return x * T(0.5) * (::erf##S(x * T(SQRT_HALF)) + T(1)); }       \
    __device__ inline T gelu_slope(T x) {                                                            \
        const T below = (::erf##S(x * T(SQRT_HALF)) + T(1)) * T(0.5);                                \
        return x * (::exp##S(x * x * T(-0.5)) * T(0.39894228040143268)) + below;                     \
    }                                                                                                \
    __device__ inline T gelu_inner(T x) {                                                            \
        return ::tanh##S(x * (x * x * T(GELU_SCALE * 0.044715) + T(GELU_SCALE)));                    \
    }                                                                                                \
    __device__ inline T gelu_tanh(T x) { return x * T(0.5) * (gelu_inner(x) + T(1)); }               \
    __device__ inline T gelu_tanh_slope(T x) {                                                       \
        const T t = gelu_inner(x), slope = x * x * T(3 * GELU_SCALE * 0.044715) + T(GELU_SCALE);     \
        return (T(1) + t + x * (T(1) - t * t) * slope) * T(0.5);                                     \
    }                                                                                                \
    __device__ inline T sin(T x) { return ::sin##S(x); }                                             \
    __device__ inline T cos(T x) { return ::cos##S(x); }                                             \
    __device__ inline T tan(T x) { return ::tan##S(x); }                                             \
    __device__ inline T asin(T x) { return ::asin##S(x); }                                           \
    __device__ inline T acos(T x) { return ::acos##S(x); }                                           \
    __device__ inline T atan(T x) { return ::atan##S(x); }                                           \
    __device__ inline T sinh(T x) { return ::sinh##S(x); }                                           \
    __device__ inline T cosh(T x) { return ::cosh##S(x); }                                           \
    __device__ inline T asinh(T x) { return ::asinh##S(x); }                                         \
    __device__ inline T acosh(T x) { return ::acosh##S(x); }                                         \
    __device__ inline T atanh(T x) { return ::atanh##S(x); }                                         \
    __device__ inline T floor(T x) { return ::floor##S(x); }                                         \
    __device__ inline T ceil(T x) { return ::ceil##S(x); }                                           \
    __device__ inline T round_even(T x) { return ::rint##S(x); }                                     \
    __device__ inline bool is_nan(T x) { return x != x; }                                            \
    __device__ inline bool is_inf(T x) { return fabs##S(x) == T(infinity()); }                       \
    /* Truncates; what no long long holds becomes the nearest, NaN 0. */                             \
    __device__ inline long long integer(T x) {                                                       \
        return x != x ? 0 : x >= T(9223372036854775808.0) ? 0x7fffffffffffffffLL                     \
               : x <= T(-9223372036854775808.0) ? -0x7fffffffffffffffLL - 1 : (long long)x;          \
    }
DCC_FLOAT(float, f)
DCC_FLOAT(double, )
#undef DCC_FLOAT

// To what bf16 holds, by the leading 16 bits of a uniform number; a NaN's digits could carry into its sign.
__device__ inline float round_stochastic(float x, float u) {
    const unsigned bits = (unsigned)__float_as_int(x) + (unsigned)(int)(u * 65536.0f) & 0xffff0000u;
    return x != x ? x : __int_as_float((int)bits);
}

// Philox4x32-10 (Salmon et al. 2011): key of `seed`, counter (element / 4, id, step), word element % 4, as a multiple of 2^-24.
__device__ inline float uniform(unsigned id, long long seed, long long step, long long element) {
    const unsigned long long counter = (unsigned long long)element / 4;
    unsigned c0 = (unsigned)counter, c1 = (unsigned)(counter >> 32), c2 = id, c3 = (unsigned)step;
    unsigned k0 = (unsigned)seed, k1 = (unsigned)((unsigned long long)seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const unsigned long long low = c0 * 0xD2511F53ull, high = c2 * 0xCD9E8D57ull;
        c0 = (unsigned)(high >> 32) ^ c1 ^ k0;
        c2 = (unsigned)(low >> 32) ^ c3 ^ k1;
        c1 = (unsigned)high;
        c3 = (unsigned)low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const unsigned at = (unsigned)element % 4, word = at == 0 ? c0 : at == 1 ? c1 : at == 2 ? c2 : c3;
    return (float)(word >> 8) * 5.9604644775390625e-8f;
}
}  // namespace op

#define DCC_REDUCTION(NAME, OP)                                   \
    struct NAME {                                                 \
        template <class T>                                        \
        __device__ static T of(T x, T y) { return op::OP(x, y); } \
    };
DCC_REDUCTION(Sum, add)
DCC_REDUCTION(Prod, mul)
DCC_REDUCTION(Max, max)
DCC_REDUCTION(Min, min)
#undef DCC_REDUCTION

// What the lane has whose number differs from the caller's by the bits of `across`.
template <class T>
__device__ inline T exchanged(T x, int across) { return (T)__shfl_xor_sync(0xffffffffu, x, across); }

// The reduction of what the threads have that share a point; each gets it, in an order that shapes alone decide.
template <int GROUP, class F, class T>
__device__ inline T together(T x) {
    for (int across = 16; across > 0; across >>= 1) x = F::of(x, exchanged(x, across));
    if (GROUP > 32) {
        DCC_SHARED_ARRAY(T, parts, [32]);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
        __syncthreads();
        x = parts[0];
        for (int warp = 1; warp < GROUP / 32; ++warp) x = F::of(x, parts[warp]);
        __syncthreads();
    }
    return x;
}
