// Products of operands that are read through a view: what a view `V` says is written for each instruction.
//   typedef …  Index;                                       of elements
//   static const Index M, N, K, BATCH;
//   static bool lhs(Index b, Index m, Index k, Index& at);  false: zero, where a window leaves the image
//   static bool rhs(Index b, Index k, Index n, Index& at);
//   static Index out(Index b, Index m, Index n);
// Fragments of tensor cores are those of tensor.cuh. Blocks along x are tiles, of all batches; along y parts of K, whose sums go to the workspace where there are several.

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
    if (gridDim.y > 1) {
        workspace[(((long long)blockIdx.y * V::BATCH + b) * V::M + m) * V::N + n] = sum;
        return;
    }
    const typename V::Index at = V::out(b, m, n);
    c[at] = narrow<C>(ADD ? (S)widen(c[at]) + sum : sum);
}

// Sums of S by multiply-adds: TILE x TILE elements of a block, EACH x EACH of a thread. LHS_K, RHS_N: along what neighbours in memory lie.
template <class V, class A, class B, class C, class S, int TILE, int EACH, bool LHS_K, bool RHS_N, bool ADD>
__device__ inline void product(const A* a, const B* b, C* c, S* workspace) {
    typedef typename V::Index I;
    const int STEP = 8, SIDE = TILE / EACH, THREADS = SIDE * SIDE;
    DCC_SHARED_ARRAY(S, as, [STEP][TILE + 1]);
    DCC_SHARED_ARRAY(S, bs, [STEP][TILE + 1]);
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
            S x[EACH], y[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) x[i] = as[k][row + i * SIDE];
#pragma unroll
            for (int j = 0; j < EACH; ++j) y[j] = bs[k][column + j * SIDE];
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
            const I m = tile.m + row + i * SIDE, n = tile.n + column + j * SIDE;
            if (m < V::M && n < V::N) put<V, C, S, ADD>(c, workspace, tile.batch, m, n, sums[i][j]);
        }
}

// Of half floats on tensor cores: 128 x 128 elements of a block of 8 warps, 64 x 32 of a warp. Operands lie in shared memory with k
// along the rows; the next step's are on their way to registers while a step is computed.
template <class V, class H, class C, bool LHS_K, bool RHS_N, bool ADD>
__device__ inline void product_of_halves(const H* a, const H* b, C* c, float* workspace) {
    typedef typename V::Index I;
    const int TILE = 128, STEP = 32, THREADS = 256, ROW = STEP + 8, LOADS = STEP * TILE / THREADS;
    DCC_SHARED_ARRAY(H, as, [TILE][ROW]);
    DCC_SHARED_ARRAY(H, bs, [TILE][ROW]);
    const Tile<V, TILE, TILE> tile(STEP);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row = warp / 4 * 64, column = warp % 4 * 32;
    float sums[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
    H x[LOADS], y[LOADS];
    auto load = [&](I k0) {
#pragma unroll
        for (int at = 0; at < LOADS; ++at) {
            const int n = at * THREADS + threadIdx.x;
            const int am = LHS_K ? n / STEP : n % TILE, ak = LHS_K ? n % STEP : n / TILE;
            const int bn = RHS_N ? n % TILE : n / STEP, bk = RHS_N ? n / TILE : n % STEP;
            I from = 0;
            x[at] = y[at] = H{0};
            if (tile.m + am < V::M && k0 + ak < tile.end && V::lhs(tile.batch, tile.m + am, k0 + ak, from)) x[at] = a[from];
            if (tile.n + bn < V::N && k0 + bk < tile.end && V::rhs(tile.batch, k0 + bk, tile.n + bn, from)) y[at] = b[from];
        }
    };
    if (tile.first < tile.end) load(tile.first);
    for (I k0 = tile.first; k0 < tile.end; k0 += STEP) {
#pragma unroll
        for (int at = 0; at < LOADS; ++at) {
            const int n = at * THREADS + threadIdx.x;
            as[LHS_K ? n / STEP : n % TILE][LHS_K ? n % STEP : n / TILE] = x[at];
            bs[RHS_N ? n % TILE : n / STEP][RHS_N ? n / TILE : n % STEP] = y[at];
        }
        __syncthreads();
        if (k0 + STEP < tile.end) load(k0 + STEP);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            unsigned p[4][4], q[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) p[i][r] = *(const unsigned*)&as[row + i * 16 + g + r % 2 * 8][k + 2 * t + r / 2 * 8];
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int r = 0; r < 2; ++r) q[j][r] = *(const unsigned*)&bs[column + j * 8 + g][k + 2 * t + r * 8];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) tensor::multiply(sums[i][j], p[i], q[j][0], q[j][1], H{0});
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const I m = tile.m + row + i * 16 + g + r / 2 * 8, n = tile.n + column + j * 8 + 2 * t + r % 2;
                if (m < V::M && n < V::N) put<V, C, float, ADD>(c, workspace, tile.batch, m, n, sums[i][j][r]);
            }
}

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
