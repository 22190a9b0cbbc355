// Attention in blocks of BLOCK queries and BLOCK keys with running maxima and sums (Dao, FlashAttention-2, 2023), by plain threads.
//
// 16 x 16 threads share a block of scores: thread (y, x) has rows y EACH + i and columns x + 16 j of it, and of the sums over its
// columns the same rows and every 16th pack of channels. The threads of a row are half a warp, so that only tiles need barriers.
// Scores are in units of log 2. Shapes are types (see attention.rs) with the sizes, the layouts and the tiles' row strides.
#ifndef DCC_ATTENTION
#define DCC_ATTENTION
namespace attention {
constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;
constexpr int THREADS = 256;

__device__ inline float exp2(float x) { return ::exp2f(x); }
__device__ inline double exp2(double x) { return ::exp2(x); }
__device__ inline float log2(float x) { return ::log2f(x); }
__device__ inline double log2(double x) { return ::log2(x); }
template <class C>
__device__ inline C hidden() { return -C(infinity()); }

// Of a number and a NaN the number: sums of exponentials keep the NaN.
struct Greatest {
    __device__ static float of(float x, float y) { return fmaxf(x, y); }
    __device__ static double of(double x, double y) { return fmax(x, y); }
};

// Which head a block is of: batch, key head, and query head of it.
template <class S>
struct Head {
    int b, h, g;
    __device__ explicit Head(int number) : b(number / (S::HEADS * S::GROUPS)), h(number / S::GROUPS % S::HEADS), g(number % S::GROUPS) {}
    template <class L>
    __device__ long long at() const { return b * L::BATCH + h * L::HEAD + g * L::GROUP; }
    // Row of a matrix [head, query].
    __device__ long long row() const { return (((long long)b * S::HEADS + h) * S::GROUPS + g) * S::QUERIES; }
};

// Keys that a query sees.
template <class S>
__device__ inline int limit(int query) {
    if (!S::CAUSAL) return S::KEYS;
    const long long seen = query + S::OFFSET + 1;
    return seen < 0 ? 0 : seen < S::KEYS ? (int)seen : S::KEYS;
}

// The first query that sees a key, in whole blocks.
template <class S>
__device__ inline int first_query(int key, int block) {
    if (!S::CAUSAL || key <= S::OFFSET) return 0;
    return (int)((key - S::OFFSET) / block * block);
}

// A score from a dot product; `mask` is the head's.
template <class S>
__device__ inline typename S::Computed score(typename S::Computed dot, const typename S::Mask* mask, int query, int key) {
    typedef typename S::Computed C;
    if (key >= limit<S>(query) || query >= S::QUERIES) return hidden<C>();
    C x = dot * C(S::scale() * LOG2_E);
    if (S::MASK == 0) return x;
    const typename S::Mask found = mask[query * S::mask::POSITION + key * S::mask::CHANNEL];
    if (S::MASK == 1) return x + C(found) * C(LOG2_E);
    return found ? x : hidden<C>();
}

// Rows from `first` on to a tile, 0 behind row `count` and behind the last channel.
template <class L, int BLOCK, int WIDTH, int APART, class C, class T>
__device__ inline void load(C* tile, const T* from, int first, int count) {
    constexpr int N = L::PACK, V = 16 / sizeof(C), M = N < V ? N : V, PACKS = (WIDTH + V - 1) / V * V / N;
    for (int i = threadIdx.x; i < BLOCK * PACKS; i += THREADS) {
        const int row = i / PACKS, channel = i % PACKS * N;
        pack<T, N> x{};
        if (first + row < count && channel < WIDTH)
            x = *(const pack<T, N>*)(from + (first + row) * L::POSITION + channel * L::CHANNEL);
#pragma unroll
        for (int part = 0; part < N; part += M) {
            pack<C, M> wide;
#pragma unroll
            for (int n = 0; n < M; ++n) wide.x[n] = widen(x.x[part + n]);
            *(pack<C, M>*)(tile + row * APART + channel + part) = wide;
        }
    }
}

// What a thread has of a block of scores, and of sums over its columns.
template <class C, int EACH>
struct Scores {
    C x[EACH][EACH];

    // Rows of `a` times rows of `b`.
    template <int WIDTH, int APART>
    __device__ void products(const C* a, const C* b) {
        constexpr int V = 16 / sizeof(C);
        a += threadIdx.x / 16 * EACH * APART;
        b += threadIdx.x % 16 * APART;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) x[i][j] = 0;
#pragma unroll 2
        for (int channel = 0; channel < WIDTH; channel += V) {
            pack<C, V> row[EACH], column[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) row[i] = *(const pack<C, V>*)(a + i * APART + channel);
#pragma unroll
            for (int j = 0; j < EACH; ++j) column[j] = *(const pack<C, V>*)(b + j * 16 * APART + channel);
#pragma unroll
            for (int n = 0; n < V; ++n)
#pragma unroll
                for (int i = 0; i < EACH; ++i)
#pragma unroll
                    for (int j = 0; j < EACH; ++j) x[i][j] += row[i].x[n] * column[j].x[n];
        }
    }

    // To the thread's rows of a tile, for the threads of its half warp.
    template <int APART>
    __device__ void share(C* tile) const {
        tile += threadIdx.x / 16 * EACH * APART + threadIdx.x % 16;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) tile[i * APART + j * 16] = x[i][j];
        __syncwarp();
    }
};

template <class C, int EACH, int WIDTH>
struct Sums {
    static constexpr int V = 16 / sizeof(C), PACKS = (WIDTH + V - 1) / V, CHUNKS = (PACKS + 15) / 16;
    C x[EACH][CHUNKS][V];

    __device__ static int channel(int chunk) { return (threadIdx.x % 16 + 16 * chunk) * V; }
    __device__ static bool there(int chunk) { return PACKS % 16 == 0 || channel(chunk) < WIDTH; }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int n = 0; n < V; ++n) x[i][c][n] = 0;
    }

    __device__ void scale(int i, C by) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int n = 0; n < V; ++n) x[i][c][n] *= by;
    }

    // Adds the thread's rows of the shared `scores` times the rows of `tile`.
    template <int SCORES_APART, int APART>
    __device__ void add(const C* scores, const C* tile) {
        scores += threadIdx.x / 16 * EACH * SCORES_APART;
#pragma unroll 2
        for (int column = 0; column < 16 * EACH; column += V) {
            pack<C, V> row[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) row[i] = *(const pack<C, V>*)(scores + i * SCORES_APART + column);
#pragma unroll
            for (int n = 0; n < V; ++n)
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    if (!there(c)) continue;
                    const pack<C, V> y = *(const pack<C, V>*)(tile + (column + n) * APART + channel(c));
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
#pragma unroll
                        for (int m = 0; m < V; ++m) x[i][c][m] += row[i].x[n] * y.x[m];
                }
        }
    }

    // Row i to `to`, times `by`.
    template <class L, class T>
    __device__ void store(int i, T* to, C by) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int n = 0; n < V; ++n)
                if (channel(c) + n < WIDTH) to[(channel(c) + n) * L::CHANNEL] = narrow<T>(x[i][c][n] * by);
    }
};

// Over the threads of a row.
template <class F, class C>
__device__ inline C across(C x) {
#pragma unroll
    for (int across = 8; across > 0; across >>= 1) x = F::of(x, exchanged(x, across));
    return x;
}

// A block of queries per block of threads, those that see the most keys first.
template <class S>
__device__ void forward(const typename S::Stored* q, const typename S::Stored* k, const typename S::Stored* v,
                        const typename S::Mask* mask, typename S::Stored* o, typename S::Computed* lse) {
    typedef typename S::Computed C;
    constexpr int BLOCK = S::FORWARD_BLOCK, EACH = BLOCK / 16, BLOCKS = (S::QUERIES + BLOCK - 1) / BLOCK, APART = BLOCK + 16 / sizeof(C);
    constexpr int WIDER = S::CHANNELS_APART > S::VALUES_APART ? S::CHANNELS_APART : S::VALUES_APART;
    DCC_SHARED(C, queries);
    C *tile = queries + BLOCK * S::CHANNELS_APART, *shared = tile + BLOCK * WIDER;
    const Head<S> head((int)(blockIdx.x / BLOCKS));
    const int first = (BLOCKS - 1 - (int)(blockIdx.x % BLOCKS)) * BLOCK, own = first + (int)threadIdx.x / 16 * EACH;
    mask += head.template at<typename S::mask>();
    load<typename S::q, BLOCK, S::CHANNELS, S::CHANNELS_APART>(queries, q + head.template at<typename S::q>(), first, S::QUERIES);
    Scores<C, EACH> scores;
    Sums<C, EACH, S::VALUES> sums;
    sums.clear();
    C most[EACH], sum[EACH];
    for (int i = 0; i < EACH; ++i) most[i] = hidden<C>(), sum[i] = 0;
    const int last = first + BLOCK < S::QUERIES ? first + BLOCK - 1 : S::QUERIES - 1, seen = limit<S>(last);
    for (int from = 0; from < seen; from += BLOCK) {
        __syncthreads();
        load<typename S::k, BLOCK, S::CHANNELS, S::CHANNELS_APART>(tile, k + head.template at<typename S::k>(), from, S::KEYS);
        __syncthreads();
        scores.template products<S::CHANNELS, S::CHANNELS_APART>(queries, tile);
        __syncthreads();
        load<typename S::v, BLOCK, S::VALUES, S::VALUES_APART>(tile, v + head.template at<typename S::v>(), from, S::KEYS);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            C peak = most[i];
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                scores.x[i][j] = score<S>(scores.x[i][j], mask, own + i, from + (int)threadIdx.x % 16 + 16 * j);
                peak = Greatest::of(peak, scores.x[i][j]);
            }
            peak = across<Greatest>(peak);
            // Of a query that has seen nothing yet every term is exp(-inf).
            const C shift = peak == hidden<C>() ? C(0) : peak, rescale = exp2(most[i] - shift);
            most[i] = peak;
            sum[i] *= rescale;
            sums.scale(i, rescale);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                scores.x[i][j] = exp2(scores.x[i][j] - shift);
                sum[i] += scores.x[i][j];
            }
        }
        scores.template share<APART>(shared);
        __syncthreads();
        sums.template add<APART, S::VALUES_APART>(shared, tile);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const C total = across<Sum>(sum[i]);
        if (own + i >= S::QUERIES) continue;
        sums.template store<typename S::o>(i, o + head.template at<typename S::o>() + (own + i) * S::o::POSITION, total == 0 ? C(0) : 1 / total);
        if (threadIdx.x % 16 == 0) lse[head.template at<typename S::lse>() + (own + i) * S::lse::POSITION] = (most[i] + log2(total)) * C(LN_2);
    }
}

// Of each query: sum of dO times O.
template <class S>
__device__ void dots(const typename S::Stored* dy, const typename S::Stored* o, typename S::Computed* deltas) {
    typedef typename S::Computed C;
    constexpr int LANES = S::DOT_LANES, N = S::o::PACK;
    typedef pack<typename S::Stored, N> P;
    const long long number = ((long long)blockIdx.x * THREADS + threadIdx.x) / LANES;
    const bool there = number < (long long)S::BATCH * S::HEADS * S::GROUPS * S::QUERIES;
    C sum = 0;
    if (there) {
        const long long at = Head<S>((int)(number / S::QUERIES)).template at<typename S::o>() + number % S::QUERIES * S::o::POSITION;
        for (int channel = threadIdx.x % LANES * N; channel < S::VALUES; channel += LANES * N) {
            const P x = *(const P*)(dy + at + channel * S::o::CHANNEL), y = *(const P*)(o + at + channel * S::o::CHANNEL);
#pragma unroll
            for (int n = 0; n < N; ++n) sum += widen(x.x[n]) * widen(y.x[n]);
        }
    }
#pragma unroll
    for (int across = LANES / 2; across > 0; across /= 2) sum += exchanged(sum, across);
    if (there && threadIdx.x % LANES == 0) deltas[number] = sum;
}

// Lse of a query in units of log 2.
template <class S>
__device__ inline typename S::Computed log_of(const Head<S>& head, const typename S::Computed* lse, int query) {
    if (query >= S::QUERIES) return hidden<typename S::Computed>();
    return lse[head.template at<typename S::lse>() + query * S::lse::POSITION] * typename S::Computed(LOG2_E);
}

template <class S>
__device__ inline typename S::Computed probability(typename S::Computed dot, typename S::Computed log, const typename S::Mask* mask, int query,
                                                   int key) {
    typedef typename S::Computed C;
    return log == hidden<C>() ? C(0) : exp2(score<S>(dot, mask, query, key) - log);
}

// dK and dV of a block of keys: over the queries that see them.
template <class S>
__device__ void backward_keys(const typename S::Stored* dy, const typename S::Stored* q, const typename S::Stored* k,
                              const typename S::Stored* v, const typename S::Computed* lse, const typename S::Mask* mask,
                              typename S::Stored* dk, typename S::Stored* dv, const typename S::Computed* deltas) {
    typedef typename S::Computed C;
    constexpr int BLOCK = S::BACKWARD_BLOCK, EACH = BLOCK / 16, BLOCKS = (S::KEYS + BLOCK - 1) / BLOCK, APART = BLOCK + 16 / sizeof(C);
    DCC_SHARED(C, keys);
    C *values = keys + BLOCK * S::CHANNELS_APART, *queries = values + BLOCK * S::VALUES_APART;
    C *gradients = queries + BLOCK * S::CHANNELS_APART, *shared = gradients + BLOCK * S::VALUES_APART;
    C *logs = shared + BLOCK * APART, *dots = logs + BLOCK;
    const int number = (int)(blockIdx.x / BLOCKS) * S::GROUPS, first = (int)(blockIdx.x % BLOCKS) * BLOCK;
    const int own = first + (int)threadIdx.x / 16 * EACH, column = threadIdx.x % 16;
    const long long from_k = Head<S>(number).template at<typename S::k>(), from_v = Head<S>(number).template at<typename S::v>();
    load<typename S::k, BLOCK, S::CHANNELS, S::CHANNELS_APART>(keys, k + from_k, first, S::KEYS);
    load<typename S::v, BLOCK, S::VALUES, S::VALUES_APART>(values, v + from_v, first, S::KEYS);
    Scores<C, EACH> p, d;
    Sums<C, EACH, S::CHANNELS> sum_k;
    Sums<C, EACH, S::VALUES> sum_v;
    sum_k.clear();
    sum_v.clear();
    for (int g = 0; g < S::GROUPS; ++g) {
        const Head<S> head(number + g);
        const typename S::Mask* own_mask = mask + head.template at<typename S::mask>();
        for (int from = first_query<S>(first, BLOCK); from < S::QUERIES; from += BLOCK) {
            __syncthreads();
            load<typename S::q, BLOCK, S::CHANNELS, S::CHANNELS_APART>(queries, q + head.template at<typename S::q>(), from, S::QUERIES);
            load<typename S::o, BLOCK, S::VALUES, S::VALUES_APART>(gradients, dy + head.template at<typename S::o>(), from, S::QUERIES);
            for (int i = threadIdx.x; i < BLOCK; i += THREADS) {
                logs[i] = log_of<S>(head, lse, from + i);
                dots[i] = from + i < S::QUERIES ? deltas[head.row() + from + i] : C(0);
            }
            __syncthreads();
            p.template products<S::CHANNELS, S::CHANNELS_APART>(keys, queries);
            d.template products<S::VALUES, S::VALUES_APART>(values, gradients);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    const int t = column + 16 * j;
                    p.x[i][j] = probability<S>(p.x[i][j], logs[t], own_mask, from + t, own + i);
                    d.x[i][j] = p.x[i][j] * (d.x[i][j] - dots[t]);
                }
            p.template share<APART>(shared);
            sum_v.template add<APART, S::VALUES_APART>(shared, gradients);
            d.template share<APART>(shared);
            sum_k.template add<APART, S::CHANNELS_APART>(shared, queries);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (own + i >= S::KEYS) continue;
        sum_k.template store<typename S::k>(i, dk + from_k + (own + i) * S::k::POSITION, C(S::scale()));
        sum_v.template store<typename S::v>(i, dv + from_v + (own + i) * S::v::POSITION, C(1));
    }
}

// dQ of a block of queries: over the keys that they see.
template <class S>
__device__ void backward_queries(const typename S::Stored* dy, const typename S::Stored* q, const typename S::Stored* k,
                                 const typename S::Stored* v, const typename S::Computed* lse, const typename S::Mask* mask,
                                 typename S::Stored* dq, const typename S::Computed* deltas) {
    typedef typename S::Computed C;
    constexpr int BLOCK = S::BACKWARD_BLOCK, EACH = BLOCK / 16, BLOCKS = (S::QUERIES + BLOCK - 1) / BLOCK, APART = BLOCK + 16 / sizeof(C);
    DCC_SHARED(C, queries);
    C *gradients = queries + BLOCK * S::CHANNELS_APART, *keys = gradients + BLOCK * S::VALUES_APART;
    C *values = keys + BLOCK * S::CHANNELS_APART, *shared = values + BLOCK * S::VALUES_APART;
    const Head<S> head((int)(blockIdx.x / BLOCKS));
    const int first = (BLOCKS - 1 - (int)(blockIdx.x % BLOCKS)) * BLOCK, own = first + (int)threadIdx.x / 16 * EACH;
    mask += head.template at<typename S::mask>();
    load<typename S::q, BLOCK, S::CHANNELS, S::CHANNELS_APART>(queries, q + head.template at<typename S::q>(), first, S::QUERIES);
    load<typename S::o, BLOCK, S::VALUES, S::VALUES_APART>(gradients, dy + head.template at<typename S::o>(), first, S::QUERIES);
    Scores<C, EACH> p, d;
    Sums<C, EACH, S::CHANNELS> sums;
    sums.clear();
    C log[EACH], dot[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        log[i] = log_of<S>(head, lse, own + i);
        dot[i] = own + i < S::QUERIES ? deltas[head.row() + own + i] : C(0);
    }
    const int last = first + BLOCK < S::QUERIES ? first + BLOCK - 1 : S::QUERIES - 1, seen = limit<S>(last);
    for (int from = 0; from < seen; from += BLOCK) {
        __syncthreads();
        load<typename S::k, BLOCK, S::CHANNELS, S::CHANNELS_APART>(keys, k + head.template at<typename S::k>(), from, S::KEYS);
        load<typename S::v, BLOCK, S::VALUES, S::VALUES_APART>(values, v + head.template at<typename S::v>(), from, S::KEYS);
        __syncthreads();
        p.template products<S::CHANNELS, S::CHANNELS_APART>(queries, keys);
        d.template products<S::VALUES, S::VALUES_APART>(gradients, values);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int key = from + (int)threadIdx.x % 16 + 16 * j;
                d.x[i][j] = probability<S>(p.x[i][j], log[i], mask, own + i, key) * (d.x[i][j] - dot[i]);
            }
        d.template share<APART>(shared);
        sums.template add<APART, S::CHANNELS_APART>(shared, keys);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (own + i < S::QUERIES)
            sums.template store<typename S::q>(i, dq + head.template at<typename S::q>() + (own + i) * S::q::POSITION, C(S::scale()));
}
}  // namespace attention
#endif
