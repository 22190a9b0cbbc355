/* Open MPI's turn of comm.py: prints `kind bytes microseconds` lines, measured as `dcc bench comm` measures.
   A figure is the median of rounds, each the mean of many transfers on the slowest rank. Fails on a wrong sum. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 7, KINDS = 5, FIRST = 16 };
static const double MOST_S = 0.1; /* of a round, judged by the first transfers */
static const double WARM_S = 0.25;
static const char *NAMES[KINDS] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"};
static int rank, ranks;
static float *source, *target;

static void transfer(int kind, int elements) {
    int part = elements / ranks > 0 ? elements / ranks : 1;
    switch (kind) {
    case 0: MPI_Allreduce(source, target, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 1: MPI_Allgather(source, part, MPI_FLOAT, target, part, MPI_FLOAT, MPI_COMM_WORLD); break;
    case 2: MPI_Reduce_scatter_block(source, target, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 3: {
        int block = part / ranks > 0 ? part / ranks : 1;
        MPI_Alltoall(source, block, MPI_FLOAT, target, block, MPI_FLOAT, MPI_COMM_WORLD);
        break;
    }
    default:
        if (rank > 1) return;
        if (rank == 0) MPI_Send(source, elements, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(target, elements, MPI_FLOAT, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(source, elements, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds of so many transfers on the slowest rank. */
static double seconds(int kind, int elements, long count) {
    MPI_Barrier(MPI_COMM_WORLD);
    double took = -MPI_Wtime(), slowest;
    for (long i = 0; i < count; i++) transfer(kind, elements);
    took += MPI_Wtime();
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 3) return fprintf(stderr, "usage: comm_mpi LEAST MOST\n"), MPI_Finalize(), 2;
    long least = atol(argv[1]), most = atol(argv[2]);
    size_t room = most / sizeof(float) + ranks * ranks;
    source = malloc(room * sizeof(float));
    target = malloc(room * sizeof(float));
    for (size_t i = 0; i < room; i++) source[i] = target[i] = 1;
    double began = MPI_Wtime(), since = 0, longest = 0;
    while (longest < WARM_S) { /* ranks that began on one processor come to others that are free */
        seconds(1, 1, 1024);
        since = MPI_Wtime() - began;
        MPI_Allreduce(&since, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    }
    for (long bytes = least; bytes <= most; bytes *= 4) {
        for (int kind = 0; kind < KINDS; kind++) {
            long count = (64L << 20) / bytes;
            count = count < 4 ? 4 : count > 4096 ? 4096 : count;
            int elements = bytes / sizeof(float), first = count < FIRST ? count : FIRST;
            double within = MOST_S / (seconds(kind, elements, first) / first);
            if (within < count) count = within < 4 ? 4 : (long)within;
            double times[ROUNDS];
            for (int round = 0; round < ROUNDS; round++)
                times[round] = seconds(kind, elements, count) / count / (kind == 4 ? 2 : 1);
            if (kind == 0 && target[0] != ranks) MPI_Abort(MPI_COMM_WORLD, 1);
            qsort(times, ROUNDS, sizeof(double), by_size);
            if (rank == 0) printf("%s %ld %.4f\n", NAMES[kind], bytes, 1e6 * times[ROUNDS / 2]), fflush(stdout);
        }
    }
    MPI_Finalize();
    return 0;
}
