/*
 * What a user would pick instead of gpunvme, on files of an ordinary filesystem, into and out of GPU memory.
 *
 *   cufile        cuFileRead and cuFileWrite, one at a time in each thread
 *   cufile-batch  cuFileBatchIOSubmit, --depth in flight in each thread
 *   pinned        pread and pwrite with O_DIRECT and pinned buffers: one with a depth of 1, else two a thread, the copy of one beside the I/O of the other
 *   pinned-hot    pread through the page cache into pinned buffers, as above; reads only
 *   pageable      read and write through the page cache, and copies from and to ordinary memory; writes end with fdatasync
 *
 * usage: peers --method NAME --file FILE --gpu N --size BYTES --pattern random|sequential --depth N --threads N --seconds S [--write]
 *
 * Each line of the standard input begins a measurement, which prints one line of JSON: so measurements of several
 * processes can take turns. At the end of the input each thread checks some of its operations against what pread finds.
 * Built by scripts/bench-gpu, on the machine with the GPU: cc peers.c -lcudart -lcufile -lpthread
 */
#define _GNU_SOURCE
#include <cuda_runtime.h>
#include <cufile.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* cuFile takes no larger batch. */
#define MAX_BATCH 128
/* Operations that each thread checks. */
#define CHECKED 16

static const char *method = "", *path;
static int gpu;
static size_t size = 4096, file_size;
static bool sequential, writing;
static unsigned depth = 1, threads = 1;
static double seconds = 1;
/* Where all threads and main meet before and after each measurement. */
static pthread_barrier_t turn;
static bool ending;

struct thread {
    pthread_t id;
    unsigned number;
    uint64_t state, position;
    uint64_t operations;
    double began, ended;
    int fd;
    CUfileHandle_t handle;
    char *device;    /* slots * size bytes of GPU memory */
    unsigned slots;
    char *host[2];   /* size bytes each */
    cudaStream_t stream[2];
};

static void die(const char *what, const char *why) {
    fprintf(stderr, "peers: %s: %s\n", what, why);
    exit(1);
}
static void cuda(cudaError_t error, const char *what) {
    if (error != cudaSuccess) die(what, cudaGetErrorString(error));
}
static void cufile(CUfileError_t error, const char *what) {
    if (error.err != CU_FILE_SUCCESS) die(what, cufileop_status_error(error.err));
}
static void whole(ssize_t done, const char *what) {
    if (done != (ssize_t)size) die(what, done < 0 ? "failed" : "moved less than was asked for");
}
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static off_t next_offset(struct thread *t) {
    uint64_t blocks = file_size / size;
    if (sequential) {
        uint64_t share = blocks / threads;
        return (t->number * share + t->position++ % share) * size;
    }
    t->state ^= t->state << 13, t->state ^= t->state >> 7, t->state ^= t->state << 17;
    return t->state % blocks * size;
}

static bool time_is_up(struct thread *t) { return now() - t->began >= seconds; }

static void one_by_one(struct thread *t) {
    while (!time_is_up(t)) {
        off_t at = next_offset(t), slot = t->operations % t->slots * size;
        whole(writing ? cuFileWrite(t->handle, t->device, size, at, slot) : cuFileRead(t->handle, t->device, size, at, slot),
              writing ? "cuFileWrite" : "cuFileRead");
        t->operations++;
    }
}

static void in_batches(struct thread *t) {
    CUfileBatchHandle_t batch;
    CUfileIOParams_t io[MAX_BATCH];
    CUfileIOEvents_t events[MAX_BATCH];
    cufile(cuFileBatchIOSetUp(&batch, depth), "cuFileBatchIOSetUp");
    while (!time_is_up(t)) {
        for (unsigned i = 0; i < depth; i++) {
            io[i] = (CUfileIOParams_t){ .mode = CUFILE_BATCH, .fh = t->handle, .opcode = writing ? CUFILE_WRITE : CUFILE_READ };
            io[i].u.batch.devPtr_base = t->device;
            io[i].u.batch.devPtr_offset = i * size;
            io[i].u.batch.file_offset = next_offset(t);
            io[i].u.batch.size = size;
        }
        cufile(cuFileBatchIOSubmit(batch, depth, io, 0), "cuFileBatchIOSubmit");
        for (unsigned left = depth; left > 0;) {
            unsigned count = left;
            cufile(cuFileBatchIOGetStatus(batch, left, &count, events, NULL), "cuFileBatchIOGetStatus");
            for (unsigned i = 0; i < count; i++) {
                if (events[i].status != CUFILE_COMPLETE) die("a batch", "an operation failed");
                whole(events[i].ret, "a batch");
            }
            left -= count;
        }
        t->operations += depth;
    }
    cuFileBatchIODestroy(batch);
}

static void pinned(struct thread *t) {
    unsigned turn = 0;
    off_t at[2] = { -1, -1 };
    while (!time_is_up(t)) {
        unsigned here = depth > 1 ? turn++ % 2 : 0, other = depth > 1 ? !here : here;
        char *slot = t->device + t->operations % t->slots * size;
        if (writing) {
            /* The copy into this buffer runs beside the write from the other. */
            at[here] = next_offset(t);
            cuda(cudaMemcpyAsync(t->host[here], slot, size, cudaMemcpyDeviceToHost, t->stream[here]), "copying");
            if (at[other] < 0) continue;
            cuda(cudaStreamSynchronize(t->stream[other]), "copying");
            whole(pwrite(t->fd, t->host[other], size, at[other]), "pwrite");
        } else {
            cuda(cudaStreamSynchronize(t->stream[here]), "copying");
            whole(pread(t->fd, t->host[here], size, next_offset(t)), "pread");
            cuda(cudaMemcpyAsync(slot, t->host[here], size, cudaMemcpyHostToDevice, t->stream[here]), "copying");
            if (depth == 1) cuda(cudaStreamSynchronize(t->stream[here]), "copying");
        }
        t->operations++;
    }
    cuda(cudaStreamSynchronize(t->stream[0]), "copying");
    cuda(cudaStreamSynchronize(t->stream[1]), "copying");
}

static void pageable(struct thread *t) {
    while (!time_is_up(t)) {
        char *slot = t->device + t->operations % t->slots * size;
        off_t at = next_offset(t);
        if (writing) {
            cuda(cudaMemcpy(t->host[0], slot, size, cudaMemcpyDeviceToHost), "copying");
            whole(pwrite(t->fd, t->host[0], size, at), "pwrite");
        } else {
            whole(pread(t->fd, t->host[0], size, at), "pread");
            cuda(cudaMemcpy(slot, t->host[0], size, cudaMemcpyHostToDevice), "copying");
        }
        t->operations++;
    }
    if (writing && fdatasync(t->fd) != 0) die("fdatasync", "failed");
}

/* One operation by the method, at an offset, from or to the first slot. */
static void once(struct thread *t, off_t at) {
    bool by_cufile = strncmp(method, "cufile", 6) == 0;
    if (by_cufile && writing) whole(cuFileWrite(t->handle, t->device, size, at, 0), "cuFileWrite");
    else if (by_cufile) whole(cuFileRead(t->handle, t->device, size, at, 0), "cuFileRead");
    else if (writing) {
        cuda(cudaMemcpy(t->host[0], t->device, size, cudaMemcpyDeviceToHost), "copying");
        whole(pwrite(t->fd, t->host[0], size, at), "pwrite");
    } else {
        whole(pread(t->fd, t->host[0], size, at), "pread");
        cuda(cudaMemcpy(t->device, t->host[0], size, cudaMemcpyHostToDevice), "copying");
    }
}

static void check(struct thread *t) {
    char *memory = malloc(size), *file = aligned_alloc(4096, size);
    for (unsigned i = 0; i < CHECKED; i++) {
        off_t at = next_offset(t);
        once(t, at);
        cuda(cudaMemcpy(memory, t->device, size, cudaMemcpyDeviceToHost), "checking");
        whole(pread(t->fd, file, size, at), "pread");
        /* Threads that write at random may meet. */
        if (memcmp(memory, file, size) != 0 && (!writing || threads == 1)) die("checking", "GPU memory and file differ");
    }
    free(memory);
    free(file);
}

static void *run(void *argument) {
    struct thread *t = argument;
    bool ordinary = strcmp(method, "pageable") == 0, cached = ordinary || strcmp(method, "pinned-hot") == 0;
    bool batch = strcmp(method, "cufile-batch") == 0;
    cuda(cudaSetDevice(gpu), "cudaSetDevice");
    t->fd = open(path, O_RDWR | (cached ? 0 : O_DIRECT));
    if (t->fd < 0) die(path, "cannot be opened");
    t->slots = batch ? depth : size < (8 << 20) ? (32 << 20) / size : 4;
    cuda(cudaMalloc((void **)&t->device, t->slots * size), "cudaMalloc");
    for (int i = 0; i < 2; i++) {
        cuda(cudaStreamCreateWithFlags(&t->stream[i], cudaStreamNonBlocking), "cudaStreamCreate");
        if (ordinary) t->host[i] = malloc(size);
        else cuda(cudaHostAlloc((void **)&t->host[i], size, cudaHostAllocDefault), "cudaHostAlloc");
    }
    if (strncmp(method, "cufile", 6) == 0) {
        CUfileDescr_t description = { .type = CU_FILE_HANDLE_TYPE_OPAQUE_FD, .handle.fd = t->fd };
        cufile(cuFileHandleRegister(&t->handle, &description), "cuFileHandleRegister");
        cufile(cuFileBufRegister(t->device, t->slots * size, 0), "cuFileBufRegister");
    }
    /* Bytes of its own, so that a write is seen; and whatever is set up at first use. */
    char *fill = malloc(size);
    memset(fill, 'a' + t->number % 26, size);
    for (unsigned i = 0; i < t->slots; i++) cuda(cudaMemcpy(t->device + i * size, fill, size, cudaMemcpyHostToDevice), "filling");
    free(fill);
    once(t, 0);
    for (;;) {
        pthread_barrier_wait(&turn);
        if (ending) break;
        t->operations = 0;
        t->began = now();
        if (batch) in_batches(t);
        else if (strcmp(method, "cufile") == 0) one_by_one(t);
        else if (strncmp(method, "pinned", 6) == 0) pinned(t);
        else pageable(t);
        t->ended = now();
        pthread_barrier_wait(&turn);
    }
    check(t);
    return NULL;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        { "method", 1, 0, 'm' }, { "file", 1, 0, 'f' }, { "gpu", 1, 0, 'g' },     { "size", 1, 0, 's' },  { "pattern", 1, 0, 'p' },
        { "depth", 1, 0, 'd' },  { "threads", 1, 0, 't' }, { "seconds", 1, 0, 'S' }, { "write", 0, 0, 'w' }, { 0 },
    };
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (option) {
        case 'm': method = optarg; break;
        case 'f': path = optarg; break;
        case 'g': gpu = atoi(optarg); break;
        case 's': size = strtoull(optarg, NULL, 10); break;
        case 'p': sequential = strcmp(optarg, "sequential") == 0; break;
        case 'd': depth = atoi(optarg); break;
        case 't': threads = atoi(optarg); break;
        case 'S': seconds = atof(optarg); break;
        case 'w': writing = true; break;
        default: return 2;
        }
    }
    static const char *const methods[] = { "cufile", "cufile-batch", "pinned", "pinned-hot", "pageable" };
    bool known = false;
    for (unsigned i = 0; i < sizeof methods / sizeof *methods; i++) known |= strcmp(method, methods[i]) == 0;
    struct stat stat_;
    if (!known || !path || size == 0 || threads == 0 || depth == 0 || depth > MAX_BATCH) die("usage", "see the head of peers.c");
    if (stat(path, &stat_) != 0 || (file_size = stat_.st_size) / size < threads) die(path, "is missing, or too small");
    if (strncmp(method, "cufile", 6) == 0) cufile(cuFileDriverOpen(), "cuFileDriverOpen");

    struct thread *all = calloc(threads, sizeof *all);
    pthread_barrier_init(&turn, NULL, threads + 1);
    for (unsigned i = 0; i < threads; i++) {
        all[i].number = i;
        all[i].state = 0x9e3779b97f4a7c15u * (i + 1);
        pthread_create(&all[i].id, NULL, run, &all[i]);
    }
    while (getchar() == '\n') {
        pthread_barrier_wait(&turn);
        pthread_barrier_wait(&turn);
        uint64_t operations = 0;
        double began = 1e300, ended = 0;
        for (unsigned i = 0; i < threads; i++) {
            operations += all[i].operations;
            if (all[i].began < began) began = all[i].began;
            if (all[i].ended > ended) ended = all[i].ended;
        }
        printf("{\"bytes\": %llu, \"seconds\": %.6f}\n", (unsigned long long)operations * size, ended - began);
        fflush(stdout);
    }
    ending = true;
    pthread_barrier_wait(&turn);
    for (unsigned i = 0; i < threads; i++) pthread_join(all[i].id, NULL);
    /* cuFile's own teardown takes seconds, and the process ends anyway. */
    _exit(0);
}
