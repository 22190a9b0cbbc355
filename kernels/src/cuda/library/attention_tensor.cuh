// Attention of half floats by tensor cores: the blocks of attention.cuh, whose rows each belong to one warp, so that scores and
// probabilities stay in registers. Tiles of what the loop runs over are two: one is copied while the other is used. A warp leaves out the
// tiles that are hidden from all its rows.
#ifndef DCC_ATTENTION_TENSOR
#define DCC_ATTENTION_TENSOR
namespace attention {
constexpr int TENSOR_THREADS = 128, WARPS = TENSOR_THREADS / 32;

// Elements between the rows of a tile: an odd number of 16 bytes, so that eight rows lie in different banks.
__device__ constexpr int apart(int width) { return (width + 15) / 16 * 16 + 8; }

// Starts copies of rows from `first` on; zeros behind row `count` and behind the last channel.
template <class L, int ROWS, int WIDTH, class T>
__device__ inline void copy_rows(T* tile, const T* from, int first, int count) {
    constexpr int CHUNKS = (WIDTH + 15) / 16 * 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += TENSOR_THREADS) {
        const int row = i / CHUNKS, channel = i % CHUNKS * 8;
        const bool there = first + row < count && channel < WIDTH;
        tensor::copy(tile + row * apart(WIDTH) + channel, there ? from + (first + row) * L::POSITION + channel : from, there);
    }
}

// Numbers of a warp: 16 HEIGHT rows of so many columns.
template <class T, int HEIGHT, int COLUMNS>
struct Grid {
    float x[HEIGHT][COLUMNS / 8][4];

    __device__ static int row(int h, int i) { return h * 16 + (int)threadIdx.x % 32 / 4 + i / 2 * 8; }
    __device__ static int column(int n, int i) { return n * 8 + (int)threadIdx.x % 4 * 2 + i % 2; }

    __device__ void clear() {
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[h][n][i] = 0;
    }

    // Rows of `a`, the warp's own, times rows of `b`.
    template <int WIDTH>
    __device__ void products(const T* a, const T* b) {
        constexpr int APART = apart(WIDTH);
        const int lane = threadIdx.x % 32;
        a += lane % 16 * APART + lane / 16 * 8;
        b += (lane % 8 + lane / 16 * 8) * APART + lane / 8 % 2 * 8;
        clear();
#pragma unroll
        for (int k = 0; k < WIDTH; k += 16) {
            unsigned left[HEIGHT][4];
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h) tensor::load(left[h], a + h * 16 * APART + k);
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) {
                unsigned right[4];
                tensor::load(right, b + n * 16 * APART + k);
#pragma unroll
                for (int h = 0; h < HEIGHT; ++h) {
                    tensor::multiply(x[h][2 * n], left[h], right[0], right[1], T{});
                    tensor::multiply(x[h][2 * n + 1], left[h], right[2], right[3], T{});
                }
            }
        }
    }

    // Adds `p` times `b`, which has a row for each column of `p`.
    template <int DEPTH>
    __device__ void add(const Grid<T, HEIGHT, DEPTH>& p, const T* b) {
        constexpr int APART = COLUMNS + 8;
        const int lane = threadIdx.x % 32;
        b += lane % 16 * APART + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) {
            unsigned left[HEIGHT][4];
#pragma unroll
            for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&from)[4] = p.x[h][2 * k + i / 2];
                    left[h][i] = tensor::both(from[i % 2 * 2], from[i % 2 * 2 + 1], T{});
                }
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; ++n) {
                unsigned right[4];
                tensor::load_transposed(right, b + k * 16 * APART + n * 16);
#pragma unroll
                for (int h = 0; h < HEIGHT; ++h) {
                    tensor::multiply(x[h][2 * n], left[h], right[0], right[1], T{});
                    tensor::multiply(x[h][2 * n + 1], left[h], right[2], right[3], T{});
                }
            }
        }
    }

    // The rows, times `by`, to rows of `to` from `first` on, below `count`, of WIDTH channels.
    template <class L, int WIDTH>
    __device__ void store(T* to, int first, int count, float by) const {
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int own = first + row(h, i);
                if (own >= count) continue;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
                    if (n * 8 < WIDTH)
                        *(unsigned*)(to + own * L::POSITION + column(n, 0)) = tensor::both(x[h][n][i] * by, x[h][n][i + 1] * by, T{});
            }
    }

    __device__ void scale(int h, int half, float by) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) x[h][n][2 * half] *= by, x[h][n][2 * half + 1] *= by;
    }
};

// Over the four lanes that share a row.
template <class F>
__device__ inline float across_row(float x) {
    x = F::of(x, exchanged(x, 1));
    return F::of(x, exchanged(x, 2));
}

// Scores of queries from `query` on against keys from `key` on, in rows and columns or (KEYS_DOWN) columns and rows.
template <class S, bool KEYS_DOWN, int HEIGHT, int COLUMNS>
__device__ inline void score_all(Grid<typename S::Stored, HEIGHT, COLUMNS>& scores, const typename S::Mask* mask, int query, int key) {
    typedef Grid<typename S::Stored, HEIGHT, COLUMNS> G;
    constexpr int KEYS = KEYS_DOWN ? 16 * HEIGHT : COLUMNS;
    if (S::MASK == 0 && key + KEYS <= limit<S>(query)) {
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) scores.x[h][n][i] *= float(S::scale() * LOG2_E);
        return;
    }
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = scores.x[h][n][i];
                const int row = G::row(h, i), column = G::column(n, i);
                x = score<S>(x, mask, query + (KEYS_DOWN ? column : row), key + (KEYS_DOWN ? row : column));
            }
}

// Keeps maxima and sums of rows while blocks of scores come.
template <class T, int HEIGHT>
struct Softmax {
    float most[HEIGHT][2], sum[HEIGHT][2];

    __device__ Softmax() {
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half) most[h][half] = hidden<float>(), sum[h][half] = 0;
    }

    // Scores become probabilities but for their rows' factors; `sums` follows a row's maximum.
    template <int COLUMNS, int WIDTH>
    __device__ void step(Grid<T, HEIGHT, COLUMNS>& scores, Grid<T, HEIGHT, WIDTH>& sums) {
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float peak = most[h][half];
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) peak = Greatest::of(peak, scores.x[h][n][2 * half + i]);
                peak = across_row<Greatest>(peak);
                const float shift = peak == hidden<float>() ? 0 : peak, rescale = tensor::exp2(most[h][half] - shift);
                most[h][half] = peak;
                float total = sum[h][half] * rescale;
                sums.scale(h, half, rescale);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& x = scores.x[h][n][2 * half + i];
                        x = tensor::exp2(x - shift);
                        total += x;
                    }
                sum[h][half] = total;
            }
    }
};

// A block of queries, those that see the most keys first, and what of it a warp has.
template <class S, int HEIGHT>
struct Queries {
    static constexpr int BLOCK = 16 * WARPS * HEIGHT, BLOCKS = (S::QUERIES + BLOCK - 1) / BLOCK;
    Head<S> head;
    // The block's first query, the warp's first row of it and that row's query; keys that the last query sees.
    int first, row, own, seen;

    __device__ Queries() : head((int)(blockIdx.x / BLOCKS)) {
        first = (BLOCKS - 1 - (int)(blockIdx.x % BLOCKS)) * BLOCK;
        row = (int)threadIdx.x / 32 * 16 * HEIGHT;
        own = first + row;
        seen = limit<S>(first + BLOCK < S::QUERIES ? first + BLOCK - 1 : S::QUERIES - 1);
    }
};

// Keys and values of a head in two tiles each: one is copied while the other is used.
template <class S, int STEP>
struct KeyTiles {
    typedef typename S::Stored T;
    static constexpr int K_TILE = STEP * apart(S::CHANNELS), V_TILE = STEP * apart(S::VALUES);
    const T *k, *v;
    T *keys, *values;
    int seen;

    __device__ KeyTiles(const Head<S>& head, const T* all_k, const T* all_v, T* shared, int seen)
        : k(all_k + head.template at<typename S::k>()), v(all_v + head.template at<typename S::v>()), keys(shared),
          values(shared + 2 * K_TILE), seen(seen) {}

    // Starts to copy those from `from` on, if any is seen.
    __device__ void start(int from, int to) const {
        if (from < seen) {
            copy_rows<typename S::k, STEP, S::CHANNELS>(keys + to * K_TILE, k, from, S::KEYS);
            copy_rows<typename S::v, STEP, S::VALUES>(values + to * V_TILE, v, from, S::KEYS);
        }
        tensor::commit();
    }

    // Calls `use` for all that are seen: with the first key's number, a tile of keys, one of values. Those from 0 on are under way.
    template <class F>
    __device__ void each(F use) const {
        for (int from = 0, now = 0; from < seen; from += STEP, now ^= 1) {
            start(from + STEP, now ^ 1);
            tensor::wait<1>();
            __syncthreads();
            use(from, keys + now * K_TILE, values + now * V_TILE);
            __syncthreads();
        }
        tensor::wait<0>();
    }
};

template <class S>
__device__ void tensor_forward(const typename S::Stored* q, const typename S::Stored* k, const typename S::Stored* v,
                               const typename S::Mask* mask, typename S::Stored* o, float* lse) {
    typedef typename S::Stored T;
    constexpr int HEIGHT = S::FORWARD_HEIGHT, STEP = S::FORWARD_STEP;
    typedef Queries<S, HEIGHT> Block;
    DCC_SHARED(T, queries);
    const Block block;
    const Head<S>& head = block.head;
    const KeyTiles<S, STEP> tiles(head, k, v, queries + Block::BLOCK * apart(S::CHANNELS), block.seen);
    mask += head.template at<typename S::mask>();
    copy_rows<typename S::q, Block::BLOCK, S::CHANNELS>(queries, q + head.template at<typename S::q>(), block.first, S::QUERIES);
    tiles.start(0, 0);
    Softmax<T, HEIGHT> rows;
    Grid<T, HEIGHT, apart(S::VALUES) - 8> sums;
    sums.clear();
    tiles.each([&](int from, const T* keys, const T* values) {
        if (from >= limit<S>(block.own + 16 * HEIGHT - 1)) return;
        Grid<T, HEIGHT, STEP> scores;
        scores.template products<S::CHANNELS>(queries + block.row * apart(S::CHANNELS), keys);
        score_all<S, false>(scores, mask, block.own, from);
        rows.step(scores, sums);
        sums.add(scores, values);
    });
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = across_row<Sum>(rows.sum[h][half]);
            const int query = block.own + sums.row(h, 2 * half);
            sums.scale(h, half, total == 0 ? 0 : 1 / total);
            if (threadIdx.x % 4 == 0 && query < S::QUERIES)
                lse[head.template at<typename S::lse>() + query * S::lse::POSITION] = (rows.most[h][half] + log2(total)) * float(LN_2);
        }
    sums.template store<typename S::o, S::VALUES>(o + head.template at<typename S::o>(), block.own, S::QUERIES, 1);
}

// dK and dV of a block of keys: over the queries that see them, of all query heads.
template <class S>
__device__ void tensor_backward_keys(const typename S::Stored* dy, const typename S::Stored* q, const typename S::Stored* k,
                                     const typename S::Stored* v, const float* lse, const typename S::Mask* mask,
                                     typename S::Stored* dk, typename S::Stored* dv, const float* deltas) {
    typedef typename S::Stored T;
    constexpr int HEIGHT = S::BACKWARD_HEIGHT, BLOCK = 16 * WARPS * HEIGHT, BLOCKS = (S::KEYS + BLOCK - 1) / BLOCK, STEP = S::BACKWARD_STEP;
    constexpr int Q_TILE = STEP * apart(S::CHANNELS), G_TILE = STEP * apart(S::VALUES);
    DCC_SHARED(T, keys);
    T *values = keys + BLOCK * apart(S::CHANNELS), *queries = values + BLOCK * apart(S::VALUES), *gradients = queries + 2 * Q_TILE;
    float *logs = (float*)(gradients + 2 * G_TILE), *dots = logs + 2 * STEP;
    const int number = (int)(blockIdx.x / BLOCKS) * S::GROUPS, first = (int)(blockIdx.x % BLOCKS) * BLOCK;
    const int warp_row = (int)threadIdx.x / 32 * 16 * HEIGHT, own = first + warp_row;
    const long long from_k = Head<S>(number).template at<typename S::k>(), from_v = Head<S>(number).template at<typename S::v>();
    copy_rows<typename S::k, BLOCK, S::CHANNELS>(keys, k + from_k, first, S::KEYS);
    copy_rows<typename S::v, BLOCK, S::VALUES>(values, v + from_v, first, S::KEYS);
    const int begin = first_query<S>(first, STEP), each = begin < S::QUERIES ? (S::QUERIES - begin + STEP - 1) / STEP : 0, steps = S::GROUPS * each;
    // Copies what step n needs.
    const auto copy = [&](int n) {
        const Head<S> head(number + n / each);
        const int from = begin + n % each * STEP, to = n % 2;
        copy_rows<typename S::q, STEP, S::CHANNELS>(queries + to * Q_TILE, q + head.template at<typename S::q>(), from, S::QUERIES);
        copy_rows<typename S::o, STEP, S::VALUES>(gradients + to * G_TILE, dy + head.template at<typename S::o>(), from, S::QUERIES);
        for (int i = threadIdx.x; i < STEP; i += TENSOR_THREADS) {
            logs[to * STEP + i] = log_of<S>(head, lse, from + i);
            dots[to * STEP + i] = from + i < S::QUERIES ? deltas[head.row() + from + i] : 0;
        }
    };
    Grid<T, HEIGHT, apart(S::CHANNELS) - 8> sum_k;
    Grid<T, HEIGHT, apart(S::VALUES) - 8> sum_v;
    sum_k.clear();
    sum_v.clear();
    if (steps > 0) copy(0);
    tensor::commit();
    for (int n = 0; n < steps; ++n) {
        if (n + 1 < steps) copy(n + 1);
        tensor::commit();
        tensor::wait<1>();
        __syncthreads();
        const int now = n % 2;
        const int from = begin + n % each * STEP;
        if (own < limit<S>(from + STEP - 1)) {
            Grid<T, HEIGHT, STEP> p, d;
            p.template products<S::CHANNELS>(keys + warp_row * apart(S::CHANNELS), queries + now * Q_TILE);
            score_all<S, true>(p, mask + Head<S>(number + n / each).template at<typename S::mask>(), from, own);
            d.template products<S::VALUES>(values + warp_row * apart(S::VALUES), gradients + now * G_TILE);
#pragma unroll
            for (int c = 0; c < STEP / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int t = now * STEP + p.column(c, i);
                    const float log = logs[t], dot = dots[t];
#pragma unroll
                    for (int h = 0; h < HEIGHT; ++h) {
                        float& x = p.x[h][c][i];
                        x = log == hidden<float>() ? 0 : tensor::exp2(x - log);
                        d.x[h][c][i] = x * (d.x[h][c][i] - dot);
                    }
                }
            sum_v.add(p, gradients + now * G_TILE);
            sum_k.add(d, queries + now * Q_TILE);
        }
        __syncthreads();
    }
    tensor::wait<0>();
    sum_k.template store<typename S::k, S::CHANNELS>(dk + from_k, own, S::KEYS, float(S::scale()));
    sum_v.template store<typename S::v, S::VALUES>(dv + from_v, own, S::KEYS, 1);
}

// dQ of a block of queries: over the keys that they see.
template <class S>
__device__ void tensor_backward_queries(const typename S::Stored* dy, const typename S::Stored* q, const typename S::Stored* k,
                                        const typename S::Stored* v, const float* lse, const typename S::Mask* mask,
                                        typename S::Stored* dq, const float* deltas) {
    typedef typename S::Stored T;
    constexpr int HEIGHT = S::BACKWARD_HEIGHT, STEP = S::BACKWARD_STEP;
    typedef Queries<S, HEIGHT> Block;
    DCC_SHARED(T, queries);
    const Block block;
    const Head<S>& head = block.head;
    T *gradients = queries + Block::BLOCK * apart(S::CHANNELS);
    const KeyTiles<S, STEP> tiles(head, k, v, gradients + Block::BLOCK * apart(S::VALUES), block.seen);
    mask += head.template at<typename S::mask>();
    copy_rows<typename S::q, Block::BLOCK, S::CHANNELS>(queries, q + head.template at<typename S::q>(), block.first, S::QUERIES);
    copy_rows<typename S::o, Block::BLOCK, S::VALUES>(gradients, dy + head.template at<typename S::o>(), block.first, S::QUERIES);
    tiles.start(0, 0);
    Grid<T, HEIGHT, apart(S::CHANNELS) - 8> sums;
    sums.clear();
    float log[HEIGHT][2], dot[HEIGHT][2];
#pragma unroll
    for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = block.own + sums.row(h, 2 * half);
            log[h][half] = log_of<S>(head, lse, query);
            dot[h][half] = query < S::QUERIES ? deltas[head.row() + query] : 0;
        }
    tiles.each([&](int from, const T* keys, const T* values) {
        if (from >= limit<S>(block.own + 16 * HEIGHT - 1)) return;
        Grid<T, HEIGHT, STEP> p, d;
        p.template products<S::CHANNELS>(queries + block.row * apart(S::CHANNELS), keys);
        score_all<S, false>(p, mask, block.own, from);
        d.template products<S::VALUES>(gradients + block.row * apart(S::VALUES), values);
#pragma unroll
        for (int h = 0; h < HEIGHT; ++h)
#pragma unroll
            for (int c = 0; c < STEP / 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float each = log[h][i / 2] == hidden<float>() ? 0 : tensor::exp2(p.x[h][c][i] - log[h][i / 2]);
                    d.x[h][c][i] = each * (d.x[h][c][i] - dot[h][i / 2]);
                }
        sums.add(d, keys);
    });
    sums.template store<typename S::q, S::CHANNELS>(dq + head.template at<typename S::q>(), block.own, S::QUERIES, float(S::scale()));
}
}  // namespace attention
#endif
