// Products of operands that are read through a view: what a view `V` says is written for each instruction.
//   typedef …  Index;                                       of elements
//   static const Index M, N, K, BATCH;
//   static bool lhs(Index b, Index m, Index k, Index& at);  false: zero, where a window leaves the image
//   static bool rhs(Index b, Index k, Index n, Index& at);
//   static Index out(Index b, Index m, Index n);
// Fragments of tensor cores are those of tensor.cuh. Blocks along x are tiles, of all batches; along y parts of K, whose sums go to the
// workspace, which is null where there is one.

#ifndef DCC_PRODUCT
#define DCC_PRODUCT

// One tile's place.
template <class V, int TILE_M, int TILE_N>
struct Tile {
    typename V::Index batch, m, n, first, end;
    __device__ Tile(int step) {
        typedef typename V::Index I;
        const I tiles_m = (V::M + TILE_M - 1) / TILE_M, tiles_n = (V::N + TILE_N - 1) / TILE_N;
        const I tile = blockIdx.x;
        m = tile % tiles_m * TILE_M;
        n = tile / tiles_m % tiles_n * TILE_N;
        batch = tile / tiles_m / tiles_n;
        const I steps = (V::K + step - 1) / step, each = (steps + gridDim.y - 1) / gridDim.y * step;
        first = blockIdx.y * each;
        end = first + each < V::K ? first + each : V::K;
    }
};

// What becomes of sums: they are stored, or added to what is there. (A tail, which is written for each nest, is another such class: VECTOR
// sums that lie side by side in the result, along n or along m, go through an elementwise kernel's statements.)
template <class C, bool ADD, bool PAIRS>
struct Stored {
    static constexpr bool IS_TAIL = false, ALONG_N = true, IN_PAIRS = PAIRS;
    static constexpr int VECTOR = 1;
    C* c;
    template <class I, class S>
    __device__ void operator()(I at, const S (&sum)[1]) const {
        c[at] = narrow<C>(ADD ? (S)widen(c[at]) + sum[0] : sum[0]);
    }
    template <class I>
    __device__ void both(I at, float x, float y) const {
        pack<C, 2>* to = (pack<C, 2>*)(c + at);
        pack<C, 2> both{};
        if (ADD) both = *to;
        both.x[0] = narrow<C>(ADD ? (float)widen(both.x[0]) + x : x);
        both.x[1] = narrow<C>(ADD ? (float)widen(both.x[1]) + y : y);
        *to = both;
    }
};

template <class V, class Out, class S>
__device__ inline void put(const Out& out, S* workspace, typename V::Index b, typename V::Index m, typename V::Index n, S sum) {
    if (workspace) {
        workspace[(((long long)blockIdx.y * V::BATCH + b) * V::M + m) * V::N + n] = sum;
        return;
    }
    const S one[1] = {sum};
    out(V::out(b, m, n), one);
}

// Sums in shared memory through a tail: ROWS x TILE of them, rows APART elements apart, from row m and column n of a batch on.
template <class V, class Tail, int ROWS, int TILE, int THREADS, int APART, class S>
__device__ inline void through(const Tail& tail, const S* sums, typename V::Index batch, typename V::Index m, typename V::Index n) {
    constexpr int VECTOR = Tail::VECTOR;
#pragma unroll 1
    for (int pack = threadIdx.x; pack < ROWS * TILE / VECTOR; pack += THREADS) {
        const int row = Tail::ALONG_N ? pack / (TILE / VECTOR) : pack % (ROWS / VECTOR) * VECTOR;
        const int column = Tail::ALONG_N ? pack % (TILE / VECTOR) * VECTOR : pack / (ROWS / VECTOR);
        // A pack that begins inside of the result ends there.
        if (m + row >= V::M || n + column >= V::N) continue;
        S x[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) x[v] = sums[(row + (Tail::ALONG_N ? 0 : v)) * APART + column + (Tail::ALONG_N ? v : 0)];
        tail(V::out(batch, m + row, n + column), x);
    }
}

// Sums of S by multiply-adds: TILE x TILE elements of a block, EACH x EACH of a thread, which are packs of neighbours, SIDE packs apart.
// LHS_K, RHS_N: along what neighbours in memory lie.
template <class V, class A, class B, class Out, class S, int TILE, int EACH, bool LHS_K, bool RHS_N>
__device__ inline void product(const A* a, const B* b, const Out& out, S* workspace) {
    typedef typename V::Index I;
    constexpr int STEP = 8, SIDE = TILE / EACH, THREADS = SIDE * SIDE, PACK = 16 / sizeof(S);
    DCC_SHARED_ARRAY(S, as, [STEP][TILE + PACK]);
    DCC_SHARED_ARRAY(S, bs, [STEP][TILE + PACK]);
    const Tile<V, TILE, TILE> tile(STEP);
    const int row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    alignas(16) S sums[EACH][EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[i][j] = S(0);
    for (I k0 = tile.first; k0 < tile.end; k0 += STEP) {
#pragma unroll
        for (int at = 0; at < STEP * TILE / THREADS; ++at) {
            const int n = at * THREADS + threadIdx.x;
            const int am = LHS_K ? n / STEP : n % TILE, ak = LHS_K ? n % STEP : n / TILE;
            const int bn = RHS_N ? n % TILE : n / STEP, bk = RHS_N ? n / TILE : n % STEP;
            I from = 0;
            S x = S(0), y = S(0);
            if (tile.m + am < V::M && k0 + ak < tile.end && V::lhs(tile.batch, tile.m + am, k0 + ak, from)) x = (S)widen(a[from]);
            if (tile.n + bn < V::N && k0 + bk < tile.end && V::rhs(tile.batch, k0 + bk, tile.n + bn, from)) y = (S)widen(b[from]);
            as[ak][am] = x;
            bs[bk][bn] = y;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < STEP; ++k) {
            alignas(16) S x[EACH], y[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i += PACK) {
                *(pack<S, PACK>*)&x[i] = *(const pack<S, PACK>*)&as[k][row * PACK + i * SIDE];
                *(pack<S, PACK>*)&y[i] = *(const pack<S, PACK>*)&bs[k][column * PACK + i * SIDE];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) sums[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
    if constexpr (Out::IS_TAIL) {
        // The rows of one pack of each thread at a time.
        constexpr int ROWS = SIDE * PACK;
        DCC_SHARED_ARRAY(S, staged, [ROWS][TILE + PACK]);
#pragma unroll 1
        for (int pass = 0; pass < EACH / PACK; ++pass) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (i / PACK != pass) continue;
#pragma unroll
                for (int j = 0; j < EACH; j += PACK)
                    *(pack<S, PACK>*)&staged[row * PACK + i % PACK][column * PACK + j * SIDE] = *(const pack<S, PACK>*)&sums[i][j];
            }
            __syncthreads();
            through<V, Out, ROWS, TILE, THREADS, TILE + PACK>(out, &staged[0][0], tile.batch, tile.m + pass * ROWS, tile.n);
            __syncthreads();
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const I m = tile.m + row * PACK + i / PACK * PACK * SIDE + i % PACK;
                const I n = tile.n + column * PACK + j / PACK * PACK * SIDE + j % PACK;
                if (m < V::M && n < V::N) put<V>(out, workspace, tile.batch, m, n, sums[i][j]);
            }
    }
}

// Of half floats on tensor cores: TILE x TILE elements of a block of 8 warps, 64 x 32 of a warp. Of STAGES tiles of each operand in shared
// memory one is used while the others come.
namespace halves {
constexpr int TILE = 128, STEP = 32, THREADS = 256, STAGES = 3, SLICES = STEP / 16;

// An operand's tiles: a row for each m or n with k along it, or (not ALONG_K) one for each k. PACK elements lie side by side in memory
// wherever one of them is read: 8 are copied past the registers, single ones pass through them, a slice of a step's at a time.
template <class V, class H, bool LHS, bool ALONG_K, int PACK>
struct Tiles {
    typedef typename V::Index I;
    static constexpr int ROWS = ALONG_K ? TILE : STEP, WIDTH = ALONG_K ? STEP : TILE, PACKS = WIDTH / PACK,
                         EACH = ROWS * PACKS / THREADS / SLICES;
    // An odd number of 16 bytes: eight rows lie in different banks.
    static constexpr int APART = WIDTH + 8, SIZE = ROWS * APART;
    H* tiles;
    H held[PACK == 8 ? 1 : EACH];

    __device__ static int row(int at) { return (at * THREADS + (int)threadIdx.x) / PACKS; }
    __device__ static int column(int at) { return (at * THREADS + (int)threadIdx.x) % PACKS * PACK; }

    // Starts to fetch a slice of the step from k0 on.
    __device__ void start(const H* from, const Tile<V, TILE, TILE>& tile, I k0, int stage, int slice) {
#pragma unroll
        for (int at = slice * EACH; at < (slice + 1) * EACH; ++at) {
            const I i = (LHS ? tile.m : tile.n) + (ALONG_K ? row(at) : column(at)), k = k0 + (ALONG_K ? column(at) : row(at));
            I place = 0;
            const bool there = i < (LHS ? V::M : V::N) && k < tile.end &&
                               (LHS ? V::lhs(tile.batch, i, k, place) : V::rhs(tile.batch, k, i, place));
            if constexpr (PACK == 8) tensor::copy(tiles + stage * SIZE + row(at) * APART + column(at), there ? from + place : from, there);
            else held[at - slice * EACH] = there ? from[place] : H{0};
        }
    }

    // Puts into its tile what did not go there by itself.
    __device__ void finish(int stage, int slice) {
        if constexpr (PACK != 8) {
#pragma unroll
            for (int at = 0; at < EACH; ++at) {
                const int to = slice * EACH + at;
                tiles[stage * SIZE + row(to) * APART + column(to)] = held[at];
            }
        }
    }

    // The fragment of rows i to i + 15 of the left operand, and of columns i to i + 15 of the right one.
    __device__ void left(unsigned (&x)[4], int stage, int i, int k) const {
        const int lane = threadIdx.x % 32;
        const H* tile = tiles + stage * SIZE;
        if (ALONG_K) tensor::load(x, tile + (i + lane % 16) * APART + k + lane / 16 * 8);
        else tensor::load_transposed(x, tile + (k + lane % 8 + lane / 16 * 8) * APART + i + lane / 8 % 2 * 8);
    }
    __device__ void right(unsigned (&x)[4], int stage, int i, int k) const {
        const int lane = threadIdx.x % 32;
        const H* tile = tiles + stage * SIZE;
        if (ALONG_K) tensor::load(x, tile + (i + lane % 8 + lane / 16 * 8) * APART + k + lane / 8 % 2 * 8);
        else tensor::load_transposed(x, tile + (k + lane % 16) * APART + i + lane / 16 * 8);
    }
};

// Two sums side by side, as one where they may be.
template <class V, class Out>
__device__ inline void put_both(const Out& out, float* workspace, typename V::Index b, typename V::Index m, typename V::Index n, float x, float y) {
    if (m >= V::M || n >= V::N) return;
    if (Out::IN_PAIRS && !workspace) return out.both(V::out(b, m, n), x, y);
    put<V>(out, workspace, b, m, n, x);
    if (n + 1 < V::N) put<V>(out, workspace, b, m, n + 1, y);
}

template <class V, class H, class Out, bool LHS_K, bool RHS_N, int LHS_PACK, int RHS_PACK>
__device__ inline void product(const H* a, const H* b, const Out& out, float* workspace) {
    typedef typename V::Index I;
    DCC_SHARED(H, shared);
    Tiles<V, H, true, LHS_K, LHS_PACK> lhs;
    Tiles<V, H, false, !RHS_N, RHS_PACK> rhs;
    lhs.tiles = shared;
    rhs.tiles = shared + STAGES * lhs.SIZE;
    const Tile<V, TILE, TILE> tile(STEP);
    const int warp = threadIdx.x / 32, row = warp / 4 * 64, column = warp % 4 * 32;
    float sums[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
    const auto start = [&](I k0, int stage, int slice) {
        if (k0 < tile.end) lhs.start(a, tile, k0, stage, slice), rhs.start(b, tile, k0, stage, slice);
        if (slice == SLICES - 1) tensor::commit();
    };
    const auto finish = [&](I k0, int stage, int slice) {
        if (k0 < tile.end) lhs.finish(stage, slice), rhs.finish(stage, slice);
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            start(tile.first + stage * STEP, stage, slice);
            finish(tile.first + stage * STEP, stage, slice);
        }
    }
    int now = 0, next = STAGES - 1;
    for (I k0 = tile.first; k0 < tile.end; k0 += STEP) {
        tensor::wait<STAGES - 2>();
        __syncthreads();
        const I ahead = k0 + (STAGES - 1) * STEP;
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            const int k = slice * 16;
            start(ahead, next, slice);
            unsigned p[4][4], q[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) lhs.left(p[i], now, row + i * 16, k);
#pragma unroll
            for (int j = 0; j < 2; ++j) rhs.right(q[j], now, column + j * 16, k);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) tensor::multiply(sums[i][j], p[i], q[j / 2][j % 2 * 2], q[j / 2][j % 2 * 2 + 1], H{0});
            finish(ahead, next, slice);
        }
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    tensor::wait<0>();
    // As `row` and `column`.
    const int thread = tensor::thread_again(), lane = thread % 32;
    if constexpr (Out::IS_TAIL) {
        // The rows of half of the warps at a time, where the tiles were.
        constexpr int ROWS = 64, APART = TILE + 8;
        float* staged = (float*)shared;
#pragma unroll 1
        for (int pass = 0; pass < TILE / ROWS; ++pass) {
            __syncthreads();
            if (thread / 128 == pass) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float* to = staged + (lane / 4 + i * 16 + half * 8) * APART + thread / 32 % 4 * 32 + lane % 4 * 2 + j * 8;
                            *(pack<float, 2>*)to = pack<float, 2>{{sums[i][j][2 * half], sums[i][j][2 * half + 1]}};
                        }
            }
            __syncthreads();
            through<V, Out, ROWS, TILE, THREADS, APART>(out, staged, tile.batch, tile.m + pass * ROWS, tile.n);
        }
    } else {
        const I first_m = tile.m + thread / 128 * 64 + lane / 4, first_n = tile.n + thread / 32 % 4 * 32 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const I m = first_m + i * 16 + half * 8, n = first_n + j * 8;
                    put_both<V>(out, workspace, tile.batch, m, n, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
                }
    }
}
}  // namespace halves

// Adds the parts of a product, in order.
template <class V, class Out, class S, int PARTS>
__device__ inline void sum_of_parts(const Out& out, const S* workspace) {
    typedef typename V::Index I;
    constexpr int VECTOR = Out::VECTOR;
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, all = (long long)V::BATCH * V::M * V::N;
    if (first >= all) return;
    constexpr long long fast = Out::ALONG_N ? V::N : V::M, slow = Out::ALONG_N ? V::M : V::N;
    const I b = (I)(first / fast / slow), m = (I)(Out::ALONG_N ? first / fast % slow : first % fast),
            n = (I)(Out::ALONG_N ? first % fast : first / fast % slow);
    const long long at = ((long long)b * V::M + m) * V::N + n, apart = Out::ALONG_N ? 1 : V::N;
    S sums[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        sums[v] = S(0);
        for (int part = 0; part < PARTS; ++part) sums[v] += workspace[part * all + at + v * apart];
    }
    out(V::out(b, m, n), sums);
}
#endif
