// Running sums along the middle dim of a dense block [OUTER, SIZE, INNER].
#ifndef DCC_SCAN
#define DCC_SCAN
namespace scan {
// Steps are counted along the sum, whichever way it runs.
template <class S>
__device__ inline long long at(int step) {
    return (long long)(S::REVERSE ? S::SIZE - 1 - step : step) * S::INNER;
}

template <class S>
__device__ inline void put(typename S::Stored* y, int step, typename S::Computed sum) {
    if (S::EXCLUSIVE && step == 0) y[at<S>(0)] = narrow<typename S::Stored>(typename S::Computed(0));
    if (step + S::EXCLUSIVE < S::SIZE) y[at<S>(step + S::EXCLUSIVE)] = narrow<typename S::Stored>(sum);
}

// A line of the block for each thread.
template <class S>
__device__ void threads(const typename S::Stored* x, typename S::Stored* y) {
    const long long n = (long long)blockIdx.x * S::THREADS + threadIdx.x, base = n / S::INNER * S::SIZE * S::INNER + n % S::INNER;
    if (n >= (long long)S::OUTER * S::INNER) return;
    typename S::Computed sum = 0;
#pragma unroll 4
    for (int step = 0; step < S::SIZE; ++step) {
        sum = op::add(sum, widen(x[base + at<S>(step)]));
        put<S>(y + base, step, sum);
    }
}

// A line for each block of threads.
template <class S>
__device__ void blocks(const typename S::Stored* x, typename S::Stored* y) {
    typedef typename S::Computed C;
    DCC_SHARED_ARRAY(C, totals, [S::THREADS / 32]);
    const long long n = blockIdx.x, base = n / S::INNER * S::SIZE * S::INNER + n % S::INNER;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    C before = 0;
    for (int first = 0; first < S::SIZE; first += S::THREADS) {
        const int step = first + (int)threadIdx.x;
        C sum = step < S::SIZE ? C(widen(x[base + at<S>(step)])) : C(0);
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const C other = __shfl_up_sync(0xffffffffu, sum, by);
            if (lane >= by) sum = op::add(other, sum);
        }
        if (lane == 31) totals[warp] = sum;
        __syncthreads();
        C own = before;
        for (int w = 0; w < S::THREADS / 32; ++w) {
            if (w == warp) own = before;
            before = op::add(before, totals[w]);
        }
        __syncthreads();
        if (step < S::SIZE) put<S>(y + base, step, op::add(own, sum));
    }
}
}  // namespace scan
#endif
