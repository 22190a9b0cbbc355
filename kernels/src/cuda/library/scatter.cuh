// out[.., index, ..] += update, every sum in the order of the sources. A block has ROWS rows of the result and reads all indices. Of few
// rows the sources are cut into PARTS, whose sums `finish` adds.
#ifndef DCC_SCATTER
#define DCC_SCATTER
namespace scatter {
// Of many columns, of which each thread has one: keeps the sources of the block's rows, in order; every thread adds their updates of its
// column to sums in shared memory.
template <class S>
__device__ void by_column(const typename S::Index* indices, const typename S::Stored* updates, typename S::Stored* out, typename S::Computed* parts) {
    typedef typename S::Computed C;
    constexpr int EACH = 4, CHUNK = S::THREADS * EACH, WARPS = S::THREADS / 32, AHEAD = 4;
    constexpr int TILES = (S::VALID + S::ROWS - 1) / S::ROWS, STRETCHES = (S::COLUMNS + S::THREADS - 1) / S::THREADS;
    constexpr int PART = ((S::SOURCES + S::PARTS - 1) / S::PARTS + CHUNK - 1) / CHUNK * CHUNK;
    DCC_SHARED_ARRAY(C, sums, [S::ROWS][S::THREADS]);
    DCC_SHARED_ARRAY(int, counts, [WARPS]);
    DCC_SHARED_ARRAY(int, sources, [CHUNK]);
    DCC_SHARED_ARRAY(unsigned char, rows, [CHUNK]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = (int)(blockIdx.x % STRETCHES) * S::THREADS + (int)threadIdx.x;
    const int first = (int)(blockIdx.x / STRETCHES % TILES) * S::ROWS, batch = (int)(blockIdx.x / STRETCHES / TILES);
    const int valid = S::VALID - first < S::ROWS ? S::VALID - first : S::ROWS;
    const int begin = (int)blockIdx.y * PART, end = begin + PART < S::SOURCES ? begin + PART : S::SOURCES;
    const bool own = column < S::COLUMNS;
    indices += S::batch_index(batch);
    updates += S::batch_update(batch) + S::column_update(column);
    out += S::batch_out(batch) + S::column_out(column) + first * S::STRIDE;
    unsigned touched = 0;
    for (int chunk = begin; chunk < end; chunk += CHUNK) {
        int row[EACH], count = 0;
        unsigned votes[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int source = chunk + (warp * EACH + i) * 32 + lane;
            row[i] = -1;
            if (source < end) {
                const long long local = op::sub(indices[S::source_index(source)], S::OFFSET + first);
                if (local >= 0 && local < valid) row[i] = (int)local;
            }
            votes[i] = __ballot_sync(0xffffffffu, row[i] >= 0);
            count += __popc(votes[i]);
        }
        if (lane == 0) counts[warp] = count;
        __syncthreads();
        int at = 0, total = 0;
        for (int w = 0; w < WARPS; ++w) {
            if (w == warp) at = total;
            total += counts[w];
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (row[i] >= 0) {
                const int place = at + __popc(votes[i] & ((1u << lane) - 1));
                sources[place] = chunk + (warp * EACH + i) * 32 + lane;
                rows[place] = (unsigned char)row[i];
            }
            at += __popc(votes[i]);
        }
        __syncthreads();
        if (!own) continue;
        for (int n = 0; n < total; n += AHEAD) {
            C update[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) update[a] = n + a < total ? C(widen(updates[S::source_update(sources[n + a])])) : C(0);
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                if (n + a >= total) continue;
                const int r = rows[n + a];
                C sum = sums[r][threadIdx.x];
                if (!(touched >> r & 1)) sum = S::ADDS && S::PARTS == 1 ? C(widen(out[r * S::STRIDE])) : C(0);
                touched |= 1u << r;
                sums[r][threadIdx.x] = op::add(sum, update[a]);
            }
        }
    }
    if (!own) return;
    for (int r = 0; r < valid; ++r) {
        const bool any = touched >> r & 1;
        const C sum = any ? sums[r][threadIdx.x] : C(0);
        if (S::PARTS > 1) parts[(((long long)blockIdx.y * S::BATCH + batch) * S::VALID + first + r) * S::COLUMNS + column] = sum;
        else if (any || !S::ADDS) out[r * S::STRIDE] = narrow<typename S::Stored>(sum);
    }
}

// Of few columns: each thread has a source. Where several have a row, the first adds, then the first of the others.
template <class S>
__device__ void by_source(const typename S::Index* indices, const typename S::Stored* updates, typename S::Stored* out,
                          typename S::Computed* parts) {
    typedef typename S::Computed C;
    constexpr int TILES = (S::VALID + S::ROWS - 1) / S::ROWS;
    constexpr int PART = ((S::SOURCES + S::PARTS - 1) / S::PARTS + S::THREADS - 1) / S::THREADS * S::THREADS;
    DCC_SHARED_ARRAY(C, sums, [S::ROWS][S::COLUMNS]);
    // Who adds to a row: the number of the round above, the thread's from the end below. It grows from round to round.
    DCC_SHARED_ARRAY(unsigned, turns, [S::ROWS]);
    const int first = (int)(blockIdx.x % TILES) * S::ROWS, batch = (int)(blockIdx.x / TILES);
    const int valid = S::VALID - first < S::ROWS ? S::VALID - first : S::ROWS;
    const int begin = (int)blockIdx.y * PART, end = begin + PART < S::SOURCES ? begin + PART : S::SOURCES;
    indices += S::batch_index(batch);
    updates += S::batch_update(batch);
    out += S::batch_out(batch) + first * S::STRIDE;
    for (int r = threadIdx.x; r < valid; r += S::THREADS) {
        turns[r] = 0;
        for (int c = 0; c < S::COLUMNS; ++c) sums[r][c] = S::ADDS && S::PARTS == 1 ? C(widen(out[r * S::STRIDE + S::column_out(c)])) : C(0);
    }
    __syncthreads();
    unsigned round = 0;
    for (int chunk = begin; chunk < end; chunk += S::THREADS) {
        const int source = chunk + (int)threadIdx.x;
        const long long local = source < end ? op::sub(indices[S::source_index(source)], S::OFFSET + first) : -1;
        bool waits = local >= 0 && local < valid;
        do {
            const unsigned turn = ++round * 1024 + 1023 - threadIdx.x;
            if (waits) atomicMax(&turns[local], turn);
            __syncthreads();
            if (waits && turns[local] == turn) {
                for (int c = 0; c < S::COLUMNS; ++c)
                    sums[local][c] = op::add(sums[local][c], C(widen(updates[S::source_update(source) + S::column_update(c)])));
                waits = false;
            }
        } while (__syncthreads_or(waits));
    }
    for (int r = threadIdx.x; r < valid; r += S::THREADS)
        for (int c = 0; c < S::COLUMNS; ++c) {
            if (S::PARTS > 1) parts[(((long long)blockIdx.y * S::BATCH + batch) * S::VALID + first + r) * S::COLUMNS + c] = sums[r][c];
            else out[r * S::STRIDE + S::column_out(c)] = narrow<typename S::Stored>(sums[r][c]);
        }
}

// An element of the result from its parts.
template <class S>
__device__ void finish(typename S::Stored* out, const typename S::Computed* parts) {
    typedef typename S::Computed C;
    const long long all = (long long)S::BATCH * S::VALID * S::COLUMNS, n = (long long)blockIdx.x * S::THREADS + threadIdx.x;
    if (n >= all) return;
    const int column = (int)(n % S::COLUMNS), row = (int)(n / S::COLUMNS % S::VALID), batch = (int)(n / S::COLUMNS / S::VALID);
    out += S::batch_out(batch) + S::column_out(column) + row * S::STRIDE;
    C sum = S::ADDS ? C(widen(*out)) : C(0);
    for (int part = 0; part < S::PARTS; ++part) sum = op::add(sum, parts[part * all + n]);
    *out = narrow<typename S::Stored>(sum);
}
}  // namespace scatter
#endif
