// The first K elements along the middle dim of a dense block [OUTER, SIZE, INNER], in order. A block of threads sorts a tile of a row. Where a
// row has several, the place of an element is how many come before it in its own tile, and by bisection in each of the others.
#ifndef DCC_TOP_K
#define DCC_TOP_K
namespace top_k {
// Unsigned, in the order of the values: NaN above all others, -0 equal to 0.
template <class S>
__device__ inline typename S::Key ordered(float x) {
    const unsigned bits = (unsigned)__float_as_int(x), sign = 1u << 31;
    return x != x ? ~0u : x == 0 ? sign : bits & sign ? ~bits : bits | sign;
}
template <class S>
__device__ inline typename S::Key ordered(double x) {
    const unsigned long long bits = (unsigned long long)__double_as_longlong(x), sign = 1ull << 63;
    return x != x ? ~0ull : x == 0 ? sign : bits & sign ? ~bits : bits | sign;
}
template <class S>
__device__ inline typename S::Key ordered(long long x) {
    const typename S::Key sign = typename S::Key(1) << (sizeof(typename S::Key) * 8 - 1);
    return (typename S::Key)x ^ (S::SIGNED ? sign : 0);
}

template <class K>
__device__ inline bool before(K a, int a_index, K b, int b_index) { return a < b || (a == b && a_index < b_index); }

// Where row `n` begins, in a block with SIZE elements along the rows.
template <class S>
__device__ inline long long row(long long n, long long size) { return n / S::INNER * size * S::INNER + n % S::INNER; }

// Bitonic (Batcher 1968): runs that ascend and descend in turn become one of twice the length, which ascends or descends.
template <class S>
__device__ void sort(typename S::Key* keys, int* indices) {
    for (int run = 2; run <= S::TILE; run *= 2) {
        for (int by = run / 2; by > 0; by /= 2) {
            for (int n = (int)threadIdx.x; n < S::TILE / 2; n += S::THREADS) {
                const int a = 2 * n - n % by, b = a + by;
                const typename S::Key key = keys[a], other = keys[b];
                const int index = indices[a], other_index = indices[b];
                if (before(other, other_index, key, index) == ((a & run) == 0)) {
                    keys[a] = other, keys[b] = key;
                    indices[a] = other_index, indices[b] = index;
                }
            }
            __syncthreads();
        }
    }
}

// Sorts a tile; its first elements are the row's, or go to the workspace.
template <class S>
__device__ void tiles(const typename S::Stored* x, long long* y, typename S::Key* workspace) {
    typedef typename S::Key K;
    DCC_SHARED_ARRAY(K, keys, [S::TILE]);
    DCC_SHARED_ARRAY(int, indices, [S::TILE]);
    const long long n = (long long)blockIdx.x / S::TILES;
    const int first = (int)(blockIdx.x % S::TILES) * S::TILE;
    x += row<S>(n, S::SIZE);
    // What lies behind the row is behind all of it.
    for (int i = (int)threadIdx.x; i < S::TILE; i += S::THREADS) {
        const int at = first + i;
        indices[i] = at;
        keys[i] = ~K(0);
        if (at < S::SIZE) {
            const K key = ordered<S>(widen(x[(long long)at * S::INNER]));
            keys[i] = S::LARGEST ? ~key : key;
        }
    }
    __syncthreads();
    sort<S>(keys, indices);
    for (int place = (int)threadIdx.x; place < S::KEPT; place += S::THREADS) {
        if (S::TILES == 1) {
            y[row<S>(n, S::K) + (long long)place * S::INNER] = indices[place];
        } else {
            const long long to = (long long)blockIdx.x * S::KEPT + place;
            workspace[to] = keys[place];
            ((int*)(workspace + S::CANDIDATES))[to] = indices[place];
        }
    }
}

// Puts the first elements of all tiles in their places.
template <class S>
__device__ void merge(long long* y, const typename S::Key* workspace) {
    const long long candidate = (long long)blockIdx.x * S::THREADS + threadIdx.x;
    if (candidate >= S::CANDIDATES) return;
    const int* indices = (const int*)(workspace + S::CANDIDATES);
    const typename S::Key key = workspace[candidate];
    const int index = indices[candidate];
    if (index >= S::SIZE) return;
    const long long own = candidate / S::KEPT, n = own / S::TILES;
    long long place = candidate % S::KEPT;
    for (long long tile = n * S::TILES; tile < (n + 1) * S::TILES && place < S::K; ++tile) {
        if (tile == own) continue;
        int low = 0, high = S::KEPT;
        while (low < high) {
            const int middle = (low + high) / 2;
            const long long at = tile * S::KEPT + middle;
            if (before(workspace[at], indices[at], key, index)) low = middle + 1;
            else high = middle;
        }
        place += low;
    }
    if (place < S::K) y[row<S>(n, S::K) + place * S::INNER] = index;
}
}  // namespace top_k
#endif
