/* Streams, events and the time line of each; see fake_cudart.h. */
#include "fake_cudart.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

ns_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void sleep_until(ns_t time) {
    struct timespec t = {time / 1000000000LL, time % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

cudaError_t wait_until(ns_t time, const char *function) {
    ns_t now = now_ns();
    trace(WAIT, current, -1, now, time > now ? time : now, now, 0, function);
    if (time > now) sleep_until(time);
    return cudaSuccess;
}

/* ------------------------------------------------------------------------------------------ the trace */

static FILE *trace_file;
static int trace_looked;
static const char *const KINDS[] = {"kernel", "copy", "set", "graph", "collective", "event", "until", "wait", "mark"};

void trace(enum kind kind, int device, int stream, ns_t start, ns_t end, ns_t host, size_t bytes, const char *name) {
    static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&writing);
    if (!trace_looked) {
        const char *path = getenv("FAKE_CUDART_TRACE");
        trace_looked = 1;
        if (path && !(trace_file = fopen(path, "we"))) perror("fake_cudart: the trace");
        if (trace_file) setvbuf(trace_file, NULL, _IOFBF, 1 << 20);
    }
    if (trace_file)
        fprintf(trace_file, "%s\t%d\t%d\t%lld\t%lld\t%lld\t%ld\t%zu\t%s\n", KINDS[kind], device, stream, (long long)start,
                (long long)end, (long long)host, (long)syscall(SYS_gettid), bytes, name ? name : "");
    pthread_mutex_unlock(&writing);
}

int lost;
EXPORT void fake_cudart_lose(void) { lost = cudaErrorIllegalAddress; }

EXPORT void fake_cudart_mark(const char *label) { /* for scripts: something of theirs begins or ends here */
    ns_t now = now_ns();
    trace(MARK, -1, -1, now, now, now, 0, label);
}

/* ------------------------------------------------------------------------------------------ the time line */

struct CUstream_st *stream_of(cudaStream_t stream) {
    if (!stream || stream == cudaStreamLegacy) return &devices[current].legacy;
    if (stream == cudaStreamPerThread) return &devices[current].per_thread; /* one for all threads */
    return stream;
}

static int blocks(const struct CUstream_st *stream) {
    return !(stream->flags & cudaStreamNonBlocking);
}

ns_t time_line(struct CUstream_st *stream) {
    struct device *d = &devices[stream->device];
    ns_t start = now_ns();
    if (stream->end > start) start = stream->end;
    if (stream == &d->legacy) {
        if (d->per_thread.end > start) start = d->per_thread.end;
        for (struct CUstream_st *s = d->streams; s; s = s->next)
            if (blocks(s) && s->end > start) start = s->end;
    } else if (blocks(stream) && d->legacy.end > start) start = d->legacy.end;
    return start;
}

void put(struct CUstream_st *stream, struct op *op, ns_t start) {
    stream->end = start + op->cost;
    if (!stream->ends) stream->ends = calloc(queue_limit, sizeof *stream->ends);
    stream->ends[stream->queued++ % queue_limit] = stream->end;
    trace(op->kind, stream->device, stream->number, start, stream->end, now_ns(), op->bytes, op->name);
}

cudaError_t queue(cudaStream_t handle, struct op *op, ns_t *ended) {
    cudaError_t error = cudaSuccess;
    if (ended) *ended = 0;
    if (lost) return (cudaError_t)lost;
    for (;;) {
        pthread_mutex_lock(&lock);
        struct CUstream_st *stream = stream_of(handle);
        if (stream->capture) {
            error = capture_op(stream, op);
            break;
        }
        ns_t room = stream->ends && stream->queued >= queue_limit ? stream->ends[stream->queued % queue_limit] : 0;
        if (room <= now_ns()) {
            put(stream, op, time_line(stream));
            do_copies(op);
            if (ended) *ended = stream->end;
            break;
        }
        pthread_mutex_unlock(&lock);
        sleep_until(room);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

ns_t device_end(int device) {
    struct device *d = &devices[device];
    pthread_mutex_lock(&lock);
    ns_t end = d->legacy.end > d->per_thread.end ? d->legacy.end : d->per_thread.end;
    for (struct CUstream_st *s = d->streams; s; s = s->next)
        if (s->end > end) end = s->end;
    pthread_mutex_unlock(&lock);
    return end;
}

/* ------------------------------------------------------------------------------------------ streams */

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    CALLED;
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    struct device *d = &devices[current];
    d->active = 1;
    *stream = (struct CUstream_st){.next = d->streams, .device = current, .number = ++d->streams_made, .flags = flags, .priority = priority};
    d->streams = stream;
    pthread_mutex_unlock(&lock);
    *made = stream;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *made) { return cudaStreamCreateWithPriority(made, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    CALLED;
    pthread_mutex_lock(&lock);
    for (struct CUstream_st **s = &devices[stream->device].streams; *s; s = &(*s)->next)
        if (*s == stream) {
            *s = stream->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    free(stream->ends);
    free(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    CALLED;
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    CALLED;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

static cudaError_t end_of(cudaStream_t handle, const char *function, ns_t *end) {
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    cudaError_t error = lost ? (cudaError_t)lost : unsafe(function);
    if (!error && stream->capture) {
        stream->capture->status = cudaStreamCaptureStatusInvalidated;
        error = cudaErrorStreamCaptureUnsupported;
    }
    *end = stream->end;
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CALLED;
    ns_t end;
    cudaError_t error = end_of(stream, __func__, &end);
    return error ? quiet(error) : wait_until(end, __func__);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CALLED;
    ns_t end;
    cudaError_t error = end_of(stream, __func__, &end);
    return error ? quiet(error) : end > now_ns() ? cudaErrorNotReady : cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    CALLED;
    pthread_mutex_lock(&lock);
    cudaError_t error = lost ? (cudaError_t)lost : unsafe(__func__);
    pthread_mutex_unlock(&lock);
    return error ? quiet(error) : wait_until(device_end(current), __func__);
}

/* ------------------------------------------------------------------------------------------ events */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    CALLED;
    struct CUevent_st *event = calloc(1, sizeof *event);
    *event = (struct CUevent_st){.device = -1, .flags = flags};
    *made = event;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, cudaEventDefault); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    CALLED;
    free(event);
    return cudaSuccess;
}

static cudaError_t record(cudaEvent_t event, cudaStream_t handle, unsigned flags, const char *function) {
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    if (lost) error = (cudaError_t)lost;
    else if (event->device >= 0 && event->device != stream->device) error = cudaErrorInvalidResourceHandle;
    else if (stream->capture && flags & cudaEventRecordExternal) {
        error = capture_op(stream, &(struct op){.kind = EVENT, .name = "external", .event = event});
    } else if (stream->capture && stream->capture->status != cudaStreamCaptureStatusActive) {
        error = cudaErrorStreamCaptureInvalidated;
    } else {
        event->device = stream->device;
        event->captured = stream->capture;
        event->time = time_line(stream);
        trace(EVENT, stream->device, stream->number, event->time, event->time, now_ns(), 0,
              stream->capture ? "captured" : event->flags & cudaEventDisableTiming ? "untimed" : "timed");
    }
    pthread_mutex_unlock(&lock);
    if (lost && error) return quiet(error);
    return error ? fail(error, function, "an event of another device, or a capture that is broken") : cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    CALLED;
    return record(event, stream, flags, __func__);
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CALLED;
    return record(event, stream, cudaEventRecordDefault, __func__);
}

static cudaError_t time_of(cudaEvent_t event, const char *function, ns_t *time) {
    pthread_mutex_lock(&lock);
    cudaError_t error = lost ? (cudaError_t)lost : unsafe(function);
    if (!error && event->captured) {
        error = cudaErrorCapturedEvent;
        for (struct capture *c = captures; c; c = c->next)
            if (c == event->captured) c->status = cudaStreamCaptureStatusInvalidated;
    }
    *time = event->time;
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    CALLED;
    ns_t time;
    cudaError_t error = time_of(event, __func__, &time);
    return error ? quiet(error) : time > now_ns() ? quiet(cudaErrorNotReady) : cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    CALLED;
    ns_t time;
    cudaError_t error = time_of(event, __func__, &time);
    return error ? quiet(error) : wait_until(time, __func__);
}

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t last) {
    CALLED;
    if (first->device < 0 || last->device < 0 || first->device != last->device ||
        (first->flags | last->flags) & cudaEventDisableTiming)
        return fail(cudaErrorInvalidResourceHandle, __func__, "never recorded, of two devices, or without timing");
    if (first->captured || last->captured) return fail(cudaErrorCapturedEvent, __func__, "captured");
    if (lost) return quiet((cudaError_t)lost);
    ns_t now = now_ns();
    if (first->time > now || last->time > now) return quiet(cudaErrorNotReady);
    *ms = (float)(round((double)(last->time - first->time) / 500.0) * 0.0005); /* half a microsecond, as documented */
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    CALLED;
    (void)flags;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    if (event->captured) {
        struct capture *found = captures;
        while (found && found != event->captured) found = found->next;
        if (!found) error = cudaErrorCapturedEvent;
        else if (stream->capture && stream->capture != found) error = cudaErrorStreamCaptureMerge;
        else stream->capture = found; /* it joins */
    } else if (stream->capture) {
        stream->capture->status = cudaStreamCaptureStatusInvalidated;
        error = cudaErrorStreamCaptureIsolation;
    } else if (event->time > stream->end) {
        stream->end = event->time;
        trace(UNTIL, stream->device, stream->number, stream->end, stream->end, now_ns(), 0, "");
    }
    pthread_mutex_unlock(&lock);
    return error ? fail(error, __func__, "of a capture and not of it") : cudaSuccess;
}
