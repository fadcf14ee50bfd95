/*
 * A simulated CUDA runtime, so that torch's own CUDA build can be run where there is no GPU. What follows is shared by
 * its files:
 *     fake_cudart.c   devices, memory, copies     fake_streams.c    streams, events, the time line
 *     fake_kernels.c  kernels and their launch    fake_graphs.c     capture into graphs
 *     fake_libraries.c  cuBLAS, NCCL, the driver, what is not played
 *
 * Kernels compute nothing: memory is zero when it is allocated, copies and memsets are really done. So what a training
 * computes here means nothing; sizes, memory, the order of things, what waits for what and how long the simulated
 * devices take do. No time measured over it is a GPU's.
 *
 * Every stream has a time line on the monotonic clock: what is queued starts when it was queued or when what is before
 * it has ended, whichever is later, and takes what it costs. Nothing runs: an event has happened once its time is past.
 *
 * Environment (all optional):
 *     FAKE_CUDART_DEVICES      how many GPUs there are (2); CUDA_VISIBLE_DEVICES picks among them, by number or UUID
 *     FAKE_CUDART_REVERSED     1: without CUDA_DEVICE_ORDER=PCI_BUS_ID they are numbered the other way round than NVML's
 *     FAKE_CUDART_MEMORY_MIB   of each (1024)
 *     FAKE_CUDART_KERNEL_US    what a kernel costs (20); fake_cudart_kernel_us sets it while a script runs
 *     FAKE_CUDART_COPY_US      what a copy costs before its bytes do (10)
 *     FAKE_CUDART_GB_S         bytes copied between host and device, or two devices, a nanosecond (12)
 *     FAKE_CUDART_QUEUE        what a stream takes before a launch waits for room (1024)
 *     FAKE_CUDART_PEERS        0: devices cannot reach each other's memory (1)
 *     FAKE_CUDART_TRACE        a file: a line for all that streams did, see `trace`
 *     FAKE_CUDART_COUNTS       a file: how often each function was called, as JSON, when the process ends
 *
 * A function that is not played says so on stderr and returns an error.
 */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16
typedef int64_t ns_t;

struct capture {
    struct capture *next;
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    enum cudaStreamCaptureStatus status;
    pthread_t thread;
    struct CUstream_st *origin;
    struct CUgraph_st *graph;
};

struct CUstream_st {
    struct CUstream_st *next; /* of its device */
    int device, number, priority;
    unsigned flags;
    ns_t end;             /* when all that is queued is over */
    ns_t *ends;           /* of the newest that were queued, a ring of `queue_limit` */
    unsigned long queued; /* ever */
    struct capture *capture;
};

struct CUevent_st {
    int device; /* -1: never recorded */
    unsigned flags;
    ns_t time;
    struct capture *captured; /* recorded last within this capture; never dereferenced */
};

enum kind { KERNEL, COPY, SET, GRAPH, COLLECTIVE, EVENT, UNTIL, WAIT, MARK }; /* UNTIL: a stream waits; WAIT: the host */
struct op {
    enum kind kind;
    const char *name;
    ns_t cost;
    size_t bytes;
    void *to;         /* of COPY and SET */
    const void *from; /* of COPY */
    int value;        /* of SET */
    struct CUevent_st *event;
};

struct device {
    int physical; /* its number as NVML counts */
    size_t total, used;
    int active; /* has a context */
    ns_t kernel_ns;
    int streams_made;
    struct CUstream_st legacy, per_thread;
    struct CUstream_st *streams; /* but for those two */
};

extern struct device devices[MAX_DEVICES];
extern int device_count;
extern pthread_mutex_t lock;
extern unsigned long queue_limit;
extern ns_t copy_ns;
extern double bytes_per_ns;
extern _Thread_local int current;
extern struct capture *captures;
extern int lost; /* an error that stays, as after a kernel that went wrong: what asks the device fails with it */

/* Every function begins with one of these: it is counted under its name, and there are devices from then on. */
struct counter {
    const char *name;
    unsigned long count;
    struct counter *next;
    int known;
};
void count_call(struct counter *counter);
#define CALLED                                   \
    do {                                         \
        static struct counter counter_;          \
        counter_.name = __func__;                \
        count_call(&counter_);                   \
    } while (0)

ns_t now_ns(void);
void sleep_until(ns_t time);
/* One line, tab-separated: kind, device, stream, start, end, queued at (ns, monotonic), thread, bytes, name. */
void trace(enum kind kind, int device, int stream, ns_t start, ns_t end, ns_t host, size_t bytes, const char *name);
cudaError_t fail(cudaError_t error, const char *function, const char *why); /* remembers it, and says it on stderr */
cudaError_t quiet(cudaError_t error);                                       /* only remembers it */
cudaError_t not_played(const char *function);

/* With the lock held: */
struct CUstream_st *stream_of(cudaStream_t stream);
ns_t time_line(struct CUstream_st *stream); /* when what is queued now would start */
void put(struct CUstream_st *stream, struct op *op, ns_t start);
void do_copies(const struct op *op);
cudaError_t capture_op(struct CUstream_st *stream, const struct op *op);
cudaError_t unsafe(const char *function); /* what a capture forbids to this thread ends that capture */

/* Without it: */
cudaError_t queue(cudaStream_t stream, struct op *op, ns_t *ended); /* waits for room; `ended` 0 if it is captured */
cudaError_t launch(const char *name, cudaStream_t stream);
cudaError_t wait_until(ns_t time, const char *function);
ns_t device_end(int device);
#endif
