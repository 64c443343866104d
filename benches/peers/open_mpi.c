// The peer of `host_collectives`: MPI_Allreduce over the float sums of one host.
//
// Every rank takes commands from a named pipe of its own, so that none of them spins while another contender runs:
// "SIZE ITERATIONS" on a line, answered by the nanoseconds that an operation took.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static FILE *open_pipe(const char *folder, const char *name, int rank, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%d", folder, name, rank);
    FILE *file = fopen(path, mode);
    if (!file) {
        perror(path);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return file;
}

int main(int count, char **words) {
    MPI_Init(&count, &words);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    FILE *in = open_pipe(words[1], "in", rank, "r");
    FILE *out = open_pipe(words[1], "out", rank, "w");
    size_t bytes;
    int iterations;
    while (fscanf(in, "%zu %d", &bytes, &iterations) == 2) {
        size_t elements = bytes / sizeof(float);
        float *given = malloc(bytes), *got = malloc(bytes);
        for (size_t i = 0; i < elements; i++) {
            given[i] = (float)(rank + i % 7);
            got[i] = 0;
        }
        for (int i = 0; i < iterations / 10 + 1; i++)
            MPI_Allreduce(given, got, (int)elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double started = now_ns();
        for (int i = 0; i < iterations; i++)
            MPI_Allreduce(given, got, (int)elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double took = (now_ns() - started) / iterations;
        for (size_t i = 0; i < elements; i++)
            if (got[i] != (float)(size * (size - 1) / 2 + size * (int)(i % 7)))
                took = -1;
        fprintf(out, "%.0f\n", took);
        fflush(out);
        free(given);
        free(got);
    }
    MPI_Finalize();
    return 0;
}
