/* Capture of streams into graphs, with its rules; a graph's launch is one piece of work of the sum of its parts. */
#include "fake_cudart.h"

#include <stdlib.h>

struct CUgraphNode_st { struct op op; };
struct CUgraph_st { struct CUgraphNode_st **nodes; size_t count, room; };
struct CUgraphExec_st { struct op *ops; size_t count; };

struct capture *captures;
static unsigned long long capture_ids;
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

cudaError_t unsafe(const char *function) {
    (void)function;
    cudaError_t error = cudaSuccess;
    if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    for (struct capture *c = captures; c; c = c->next) {
        int own = pthread_equal(c->thread, pthread_self()) && c->mode != cudaStreamCaptureModeRelaxed;
        int others = c->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (!own && !others) continue;
        c->status = cudaStreamCaptureStatusInvalidated;
        error = cudaErrorStreamCaptureUnsupported;
    }
    return error;
}

cudaError_t capture_op(struct CUstream_st *stream, const struct op *op) {
    struct capture *c = stream->capture;
    struct CUgraph_st *g = c->graph;
    if (c->status != cudaStreamCaptureStatusActive) return cudaErrorStreamCaptureInvalidated;
    if (g->count == g->room) g->nodes = realloc(g->nodes, (g->room = g->room * 2 + 64) * sizeof *g->nodes);
    g->nodes[g->count] = malloc(sizeof **g->nodes);
    g->nodes[g->count++]->op = *op;
    return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    CALLED;
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    CALLED;
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    struct capture *c = NULL;
    if (!stream->capture && stream != &devices[stream->device].legacy) {
        c = calloc(1, sizeof *c);
        *c = (struct capture){.next = captures, .id = ++capture_ids, .mode = mode, .status = cudaStreamCaptureStatusActive,
                              .thread = pthread_self(), .origin = stream, .graph = calloc(1, sizeof(struct CUgraph_st))};
        stream->capture = captures = c;
    }
    pthread_mutex_unlock(&lock);
    return c ? cudaSuccess : fail(cudaErrorStreamCaptureUnsupported, __func__, "the legacy stream, or one that captures");
}

static void destroy(struct CUgraph_st *graph) {
    for (size_t i = 0; i < graph->count; i++) free(graph->nodes[i]);
    free(graph->nodes);
    free(graph);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    CALLED;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    struct capture *c = stream->capture, **place = &captures;
    *graph = NULL;
    if (!c) error = cudaErrorIllegalState;
    else if (c->origin != stream) error = cudaErrorStreamCaptureUnmatched;
    else if (c->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(c->thread, pthread_self())) error = cudaErrorStreamCaptureWrongThread;
    else {
        while (*place != c) place = &(*place)->next;
        *place = c->next;
        for (int i = 0; i < device_count; i++) {
            if (devices[i].per_thread.capture == c) devices[i].per_thread.capture = NULL;
            for (struct CUstream_st *s = devices[i].streams; s; s = s->next)
                if (s->capture == c) s->capture = NULL;
        }
        if (c->status == cudaStreamCaptureStatusActive) *graph = c->graph;
        else {
            destroy(c->graph);
            error = cudaErrorStreamCaptureInvalidated;
        }
        /* Not freed: events remember by its address that they were recorded in it. */
    }
    pthread_mutex_unlock(&lock);
    return error ? fail(error, __func__, "the capture is not to be had") : cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    CALLED;
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    *status = stream->capture ? stream->capture->status : cudaStreamCaptureStatusNone;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    CALLED;
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = stream_of(handle);
    struct capture *c = stream->capture;
    *status = c ? c->status : cudaStreamCaptureStatusNone;
    if (c && id) *id = c->id;
    if (graph) *graph = c ? c->graph : NULL;
    if (edges) *edges = NULL;
    if (count) *count = c && c->graph->count ? 1 : 0; /* all is captured as one line of work */
    if (dependencies) *dependencies = c && c->graph->count ? &c->graph->nodes[c->graph->count - 1] : NULL;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    CALLED;
    for (size_t i = 0; nodes && i < *count && i < graph->count; i++) nodes[i] = graph->nodes[i];
    if (!nodes || *count > graph->count) *count = graph->count;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    CALLED;
    (void)flags;
    struct CUgraphExec_st *e = calloc(1, sizeof *e);
    e->count = graph->count;
    e->ops = calloc(graph->count ? graph->count : 1, sizeof *e->ops);
    for (size_t i = 0; i < graph->count; i++) e->ops[i] = graph->nodes[i]->op;
    *made = e;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    CALLED;
    struct op whole = {.kind = GRAPH, .name = "graph"};
    for (size_t i = 0; i < exec->count; i++) whole.cost += exec->ops[i].cost;
    ns_t ended;
    cudaError_t error = queue(stream, &whole, &ended);
    for (size_t i = 0; !error && i < exec->count; i++) {
        do_copies(&exec->ops[i]);
        if (exec->ops[i].event) exec->ops[i].event->time = ended;
    }
    return error ? quiet(error) : cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    CALLED;
    free(exec->ops);
    free(exec);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    CALLED;
    destroy(graph);
    return cudaSuccess;
}
