// Tensor cores, and copies to shared memory that threads do not wait for: one instruction each. An emulation of them is in the
// stand-in's device.h. Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): lane l has of a 16 x 8
// result rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#ifndef DCC_TENSOR
#define DCC_TENSOR
namespace tensor {
#ifndef DCC_EMULATED
__device__ inline unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// Four 8 x 8 matrices: lanes 8 m to 8 m + 7 have the addresses of the rows of matrix m.
__device__ inline void load(unsigned (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}
__device__ inline void load_transposed(unsigned (&x)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(row)) : "memory");
}

// sums += a b, of which b has two registers.
#define DCC_MMA(T, NAME)                                                                                                          \
    __device__ inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, T) {                      \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
                     "{%0, %1, %2, %3};"                                                                                          \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                             \
    }
DCC_MMA(f16, "f16")
DCC_MMA(bf16, "bf16")
#undef DCC_MMA

// 16 bytes to shared memory, or zeros: there after `commit` and a wait for the group, and a barrier for other threads.
__device__ inline void copy(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N groups of this thread are under way.
template <int N>
__device__ inline void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// threadIdx.x, read anew: what follows from it need not stay in registers through a loop.
__device__ inline int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Two numbers in one register, the first in its low half.
__device__ inline unsigned both(float low, float high, f16) {
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ inline unsigned both(float low, float high, bf16) {
    unsigned x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
__device__ inline float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
__device__ inline void load(unsigned (&x)[4], const void* row) { emulated::load_matrices(x, row, false); }
__device__ inline void load_transposed(unsigned (&x)[4], const void* row) { emulated::load_matrices(x, row, true); }
template <class T>
__device__ inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, T) {
    emulated::multiply(sums, a, b0, b1, [](unsigned short bits) { return widen(T{bits}); });
}
__device__ inline void copy(void* to, const void* from, bool there) { emulated::copy(to, from, there); }
__device__ inline void commit() { emulated::commit(); }
template <int N>
__device__ inline void wait() { emulated::wait(N); }
__device__ inline int thread_again() { return threadIdx.x; }
template <class T>
__device__ inline unsigned both(float low, float high, T) { return narrow<T>(low).bits | (unsigned)narrow<T>(high).bits << 16; }
__device__ inline float exp2(float x) { return ::exp2f(x); }
#endif
}  // namespace tensor
#endif
