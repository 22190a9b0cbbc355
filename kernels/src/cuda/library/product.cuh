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

template <class V, class C, class S, bool ADD>
__device__ inline void put(C* c, S* workspace, typename V::Index b, typename V::Index m, typename V::Index n, S sum) {
    if (workspace) {
        workspace[(((long long)blockIdx.y * V::BATCH + b) * V::M + m) * V::N + n] = sum;
        return;
    }
    const typename V::Index at = V::out(b, m, n);
    c[at] = narrow<C>(ADD ? (S)widen(c[at]) + sum : sum);
}

// Sums of S by multiply-adds: TILE x TILE elements of a block, EACH x EACH of a thread, which are packs of neighbours, SIDE packs apart.
// LHS_K, RHS_N: along what neighbours in memory lie.
template <class V, class A, class B, class C, class S, int TILE, int EACH, bool LHS_K, bool RHS_N, bool ADD>
__device__ inline void product(const A* a, const B* b, C* c, S* workspace) {
    typedef typename V::Index I;
    constexpr int STEP = 8, SIDE = TILE / EACH, THREADS = SIDE * SIDE, PACK = 16 / sizeof(S);
    DCC_SHARED_ARRAY(S, as, [STEP][TILE + PACK]);
    DCC_SHARED_ARRAY(S, bs, [STEP][TILE + PACK]);
    const Tile<V, TILE, TILE> tile(STEP);
    const int row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    S sums[EACH][EACH];
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
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const I m = tile.m + row * PACK + i / PACK * PACK * SIDE + i % PACK, n = tile.n + column * PACK + j / PACK * PACK * SIDE + j % PACK;
            if (m < V::M && n < V::N) put<V, C, S, ADD>(c, workspace, tile.batch, m, n, sums[i][j]);
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

// Two sums side by side, as one where PAIRS says that they may be.
template <class V, class C, bool PAIRS, bool ADD>
__device__ inline void put_both(C* c, float* workspace, typename V::Index b, typename V::Index m, typename V::Index n, float x, float y) {
    if (m >= V::M || n >= V::N) return;
    if (!PAIRS || workspace) {
        put<V, C, float, ADD>(c, workspace, b, m, n, x);
        if (n + 1 < V::N) put<V, C, float, ADD>(c, workspace, b, m, n + 1, y);
        return;
    }
    pack<C, 2>* to = (pack<C, 2>*)(c + V::out(b, m, n));
    pack<C, 2> both{};
    if (ADD) both = *to;
    both.x[0] = narrow<C>(ADD ? (float)widen(both.x[0]) + x : x);
    both.x[1] = narrow<C>(ADD ? (float)widen(both.x[1]) + y : y);
    *to = both;
}

template <class V, class H, class C, bool LHS_K, bool RHS_N, int LHS_PACK, int RHS_PACK, bool PAIRS, bool ADD>
__device__ inline void product(const H* a, const H* b, C* c, float* workspace) {
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
    const I first_m = tile.m + thread / 128 * 64 + lane / 4, first_n = tile.n + thread / 32 % 4 * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const I m = first_m + i * 16 + half * 8, n = first_n + j * 8;
                put_both<V, C, PAIRS, ADD>(c, workspace, tile.batch, m, n, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
            }
}
}  // namespace halves

// Adds the parts of a product, in order.
template <class V, class C, class S, int PARTS, bool ADD>
__device__ inline void sum_of_parts(C* c, const S* workspace) {
    typedef typename V::Index I;
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x, all = (long long)V::BATCH * V::M * V::N;
    if (at >= all) return;
    S sum = S(0);
    for (int part = 0; part < PARTS; ++part) sum += workspace[part * all + at];
    const I to = V::out((I)(at / V::N / V::M), (I)(at / V::N % V::M), (I)(at % V::N));
    c[to] = narrow<C>(ADD ? (S)widen(c[to]) + sum : sum);
}
#endif
