/*
 * What torch calls beside the runtime: matrix products (cuBLAS and cuBLASLt), torch's own use of NCCL, the driver. Each
 * product is a kernel on its stream; a collective begins when the last of its streams has come to it.
 *
 * Signatures that hang on nothing but their first words are written with those alone: the others are never looked at.
 */
#include "fake_cudart.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------ cuBLAS */

struct blas { cudaStream_t stream; int math, pointers; };
enum { BLAS_OK = 0, BLAS_FAILED = 13, BLAS_NOT_SUPPORTED = 15 };

static int product(const char *name, cudaStream_t stream) { return launch(name, stream) ? BLAS_FAILED : BLAS_OK; }

EXPORT int cublasCreate_v2(struct blas **made) {
    CALLED;
    *made = calloc(1, sizeof **made);
    return BLAS_OK;
}
EXPORT int cublasDestroy_v2(struct blas *handle) {
    CALLED;
    free(handle);
    return BLAS_OK;
}
EXPORT int cublasSetStream_v2(struct blas *handle, cudaStream_t stream) { return handle->stream = stream, BLAS_OK; }
EXPORT int cublasSetWorkspace_v2(struct blas *handle) { return (void)handle, BLAS_OK; }
EXPORT int cublasSetMathMode(struct blas *handle, int mode) { return handle->math = mode, BLAS_OK; }
EXPORT int cublasGetMathMode(struct blas *handle, int *mode) { return *mode = handle->math, BLAS_OK; }
EXPORT int cublasSetPointerMode_v2(struct blas *handle, int mode) { return handle->pointers = mode, BLAS_OK; }
EXPORT int cublasGetPointerMode_v2(struct blas *handle, int *mode) { return *mode = handle->pointers, BLAS_OK; }

#define PRODUCT(name)                           \
    EXPORT int name(struct blas *handle) {      \
        CALLED;                                 \
        return product(#name, handle->stream);  \
    }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)

static int made(void **handle) { return (*handle = calloc(1, 512)) ? BLAS_OK : BLAS_FAILED; }
static int freed(void *handle) { return free(handle), BLAS_OK; }
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void **handle) { return made(handle); }
EXPORT int cublasLtMatmulDescDestroy(void *handle) { return freed(handle); }
EXPORT int cublasLtMatmulDescSetAttribute(void *handle) { return (void)handle, BLAS_OK; }
EXPORT int cublasLtMatmulPreferenceCreate(void **handle) { return made(handle); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *handle) { return freed(handle); }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void *handle) { return (void)handle, BLAS_OK; }
EXPORT int cublasLtMatrixLayoutCreate(void **handle) { return made(handle); }
EXPORT int cublasLtMatrixLayoutDestroy(void *handle) { return freed(handle); }
EXPORT int cublasLtMatrixLayoutSetAttribute(void *handle) { return (void)handle, BLAS_OK; }

struct heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d, void *preference,
                                          int wanted, struct heuristic *found, int *count) {
    CALLED;
    (void)handle, (void)description, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *count = wanted > 0;
    if (wanted > 0) *found = (struct heuristic){.waves = 1};
    return BLAS_OK;
}
EXPORT int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a, void *a_layout, const void *b,
                          void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                          const void *algorithm, void *workspace, size_t size, cudaStream_t stream) {
    CALLED;
    (void)handle, (void)description, (void)alpha, (void)a, (void)a_layout, (void)b, (void)b_layout, (void)beta, (void)c;
    (void)c_layout, (void)d, (void)d_layout, (void)algorithm, (void)workspace, (void)size;
    return product(__func__, stream);
}

/* ------------------------------------------------------------------------------------------ NCCL, in one process */

struct comm { int device, rank, size; };
enum { NCCL_OK = 0, NCCL_FAILED = 1, NCCL_INVALID = 4 };
enum { MOST = 64 };
static _Thread_local struct collective {
    const char *name;
    const void *from;
    void *to;
    size_t bytes;
    int root;
    struct comm *comm;
    struct CUstream_st *stream;
} waiting[MOST];
static _Thread_local int waiting_count, group;

static size_t size_of(int type) { /* ncclDataType_t */
    static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? SIZES[type] : 0;
}

static int run_group(void) {
    int result = NCCL_OK;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < waiting_count && !result; i++)
        if (waiting[i].stream->capture) result = NCCL_INVALID; /* not played */
    while (waiting_count && !result) {
        struct collective first = waiting[0], rest[MOST], *root = NULL;
        int members = 0, left = 0;
        ns_t start = 0;
        struct collective together[MOST];
        for (int i = 0; i < waiting_count; i++) { /* each rank's first is one collective */
            int seen = 0;
            for (int j = 0; j < members; j++) seen |= together[j].comm == waiting[i].comm;
            if (seen) rest[left++] = waiting[i];
            else together[members++] = waiting[i];
        }
        for (int i = 0; i < members; i++) {
            ns_t ready = time_line(together[i].stream);
            if (ready > start) start = ready;
            if (together[i].comm->rank == together[i].root) root = &together[i];
        }
        if (members != first.comm->size || !root) result = NCCL_INVALID;
        for (int i = 0; i < members && !result; i++) {
            struct collective *c = &together[i];
            ns_t ready = time_line(c->stream);
            /* Its kernel runs from when its own stream has come to it: it waits there for the others. */
            struct op op = {.kind = COLLECTIVE, .name = c->name, .bytes = c->bytes};
            op.cost = start - ready + copy_ns + (ns_t)(c->bytes / bytes_per_ns);
            put(c->stream, &op, ready);
            if (c->to && c->to != root->from) memcpy(c->to, root->from, c->bytes);
        }
        memcpy(waiting, rest, (size_t)left * sizeof *rest);
        waiting_count = left;
    }
    pthread_mutex_unlock(&lock);
    waiting_count = 0;
    if (result) fail(cudaErrorInvalidValue, "NCCL", "not all ranks of a communicator, or captured");
    return result;
}

static int collective(const char *name, const void *from, void *to, size_t count, int type, int root, struct comm *comm, cudaStream_t stream) {
    if (waiting_count == MOST || !size_of(type)) return fail(cudaErrorInvalidValue, name, "too many, or of no known type"), NCCL_INVALID;
    waiting[waiting_count++] = (struct collective){name, from, to, count * size_of(type), root, comm, NULL};
    struct CUstream_st *found = stream ? stream_of(stream) : &devices[comm->device].legacy;
    waiting[waiting_count - 1].stream = found;
    return group ? NCCL_OK : run_group();
}

EXPORT int ncclGetVersion(int *version) { return *version = 22907, NCCL_OK; }
EXPORT const char *ncclGetErrorString(int result) { return result ? "a simulated failure" : "no error"; }
EXPORT const char *ncclGetLastError(void *comm) { return (void)comm, ""; }
EXPORT int ncclCommInitAll(struct comm **comms, int count, const int *list) {
    CALLED;
    for (int i = 0; i < count; i++) {
        comms[i] = malloc(sizeof **comms);
        *comms[i] = (struct comm){list ? list[i] : i, i, count};
    }
    return NCCL_OK;
}
EXPORT int ncclCommCount(const struct comm *comm, int *count) { return *count = comm->size, NCCL_OK; }
EXPORT int ncclCommUserRank(const struct comm *comm, int *rank) { return *rank = comm->rank, NCCL_OK; }
EXPORT int ncclCommDestroy(struct comm *comm) { return free(comm), NCCL_OK; }
EXPORT int ncclCommGetAsyncError(struct comm *comm, int *error) { return (void)comm, *error = NCCL_OK; }
EXPORT int ncclGroupStart(void) { return group++, NCCL_OK; }
EXPORT int ncclGroupEnd(void) { return --group ? NCCL_OK : run_group(); }
EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, struct comm *comm, cudaStream_t stream) {
    CALLED;
    return collective(__func__, buffer, buffer, count, type, root, comm, stream);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *comm, cudaStream_t stream) {
    CALLED;
    return collective(__func__, from, to, count, type, root, comm, stream);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, struct comm *comm, cudaStream_t stream) {
    CALLED;
    (void)op, (void)to; /* it computes nothing */
    return collective(__func__, from, NULL, count, type, root, comm, stream);
}
EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, struct comm *comm, cudaStream_t stream) {
    CALLED;
    (void)op, (void)to;
    return collective(__func__, from, NULL, count, type, 0, comm, stream);
}

/* ------------------------------------------------------------------------------------------ the driver */

EXPORT int cuInit(unsigned flags) { return (void)flags, 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) {
    CALLED;
    return *device = ordinal, ordinal >= 0 && ordinal < device_count ? 0 : cudaErrorInvalidDevice;
}
EXPORT int cuDeviceGetCount(int *count) {
    CALLED;
    return *count = device_count, 0;
}
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    CALLED;
    *flags = 0;
    *active = devices[device].active;
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = &devices[device], devices[device].active = 1, 0; }
EXPORT int cuCtxGetCurrent(void **context) { return *context = devices[current].active ? &devices[current] : NULL, 0; }
EXPORT int cuCtxSetCurrent(struct device *context) {
    if (context) current = (int)(context - devices);
    return 0;
}
EXPORT int cuGetErrorString(int error, const char **text) { return *text = cudaGetErrorString(error), 0; }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }

/* ------------------------------------------------------------------------------------------ what is not played */

#define RUNTIME(X)                                                                                                             \
    X(cudaDeviceGetDefaultMemPool) X(cudaFreeAsync) X(cudaMallocAsync) X(cudaMemPoolGetAttribute) X(cudaMemPoolSetAccess)      \
    X(cudaMemPoolSetAttribute) X(cudaMemPoolTrimTo) X(cudaGraphNodeGetDependencies) X(cudaIpcCloseMemHandle)                   \
    X(cudaIpcGetMemHandle) X(cudaIpcOpenMemHandle) X(cudaIpcGetEventHandle) X(cudaIpcOpenEventHandle) X(cudaGetSymbolAddress)  \
    X(cudaMemcpyToSymbol) X(cudaGraphAddNode) X(cudaGraphConditionalHandleCreate) X(cudaGraphDebugDotPrint)                    \
    X(cudaHostRegister) X(cudaHostUnregister) X(cudaKernelSetAttributeForDevice) X(cudaLibraryGetKernel)                       \
    X(cudaLibraryLoadData) X(cudaLibraryUnload) X(cudaStreamAddCallback) X(cudaStreamBeginCaptureToGraph)                      \
    X(cudaStreamUpdateCaptureDependencies) X(cudaLaunchHostFunc) X(cudaProfilerStart) X(cudaProfilerStop)                      \
    X(cudaMemcpy2DAsync) X(cudaLaunchCooperativeKernel) X(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
#define DRIVER(X)                                                                                                              \
    X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuFuncSetCacheConfig) X(cuLaunchCooperativeKernel) X(cuLaunchKernel)         \
    X(cuLinkAddData_v2) X(cuLinkComplete) X(cuLinkCreate_v2) X(cuModuleGetFunction) X(cuModuleLoad) X(cuModuleLoadData)        \
    X(cuModuleLoadDataEx) X(cuModuleUnload) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuPointerGetAttribute)            \
    X(cuTensorMapEncodeTiled) X(cuMemGetAddressRange) X(cuMemAddressReserve) X(cuMemRelease) X(cuMemMap) X(cuMemAddressFree)   \
    X(cuMemSetAccess) X(cuMemUnmap) X(cuMemCreate) X(cuMemGetAllocationGranularity) X(cuMemExportToShareableHandle)            \
    X(cuMemRetainAllocationHandle) X(cuMemsetD32Async) X(cuStreamWriteValue32) X(cuCtxFromGreenCtx) X(cuCtxPopCurrent)         \
    X(cuCtxPushCurrent) X(cuGreenCtxCreate) X(cuGreenCtxDestroy) X(cuGreenCtxStreamCreate) X(cuDevSmResourceSplitByCount)      \
    X(cuDeviceGetDevResource) X(cuDevResourceGenerateDesc) X(cuMulticastAddDevice) X(cuMulticastBindMem) X(cuMulticastCreate)  \
    X(cuMulticastUnbind) X(cuMemImportFromShareableHandle) X(cuMemGetAllocationPropertiesFromHandle)
#define OTHERS(X)                                                                                                              \
    X(cublasCdotc_v2) X(cublasCdotu_v2) X(cublasCgelsBatched) X(cublasCgemmStridedBatched) X(cublasCgemm_v2)                   \
    X(cublasCgemv_v2) X(cublasCgeqrfBatched) X(cublasCgetrfBatched) X(cublasCgetrsBatched) X(cublasCtrsmBatched)               \
    X(cublasCtrsm_v2) X(cublasDgelsBatched) X(cublasDgeqrfBatched) X(cublasDgetrfBatched) X(cublasDgetrsBatched)               \
    X(cublasDtrsmBatched) X(cublasDtrsm_v2) X(cublasSetSmCountTarget) X(cublasSgelsBatched) X(cublasSgeqrfBatched)             \
    X(cublasSgetrfBatched) X(cublasSgetrsBatched) X(cublasStrsmBatched) X(cublasStrsm_v2) X(cublasZdotc_v2) X(cublasZdotu_v2)  \
    X(cublasZgelsBatched) X(cublasZgemmStridedBatched) X(cublasZgemm_v2) X(cublasZgemv_v2) X(cublasZgeqrfBatched)              \
    X(cublasZgetrfBatched) X(cublasZgetrsBatched) X(cublasZtrsmBatched) X(cublasZtrsm_v2) X(ncclAllGather) X(ncclAlltoAll)     \
    X(ncclCommAbort) X(ncclCommInitRank) X(ncclCommInitRankConfig) X(ncclCommInitRankScalable) X(ncclCommSplit)                \
    X(ncclGetUniqueId) X(ncclRecv) X(ncclReduceScatter) X(ncclSend) X(cudnnCreate)

/* Under other names in C, so that they need not have the headers' signatures. */
#define STUB(name)                                                                          \
    EXPORT int stub_##name(void) __asm__(#name);                                            \
    int stub_##name(void) { return not_played(#name); }
RUNTIME(STUB)
DRIVER(STUB)
OTHERS(STUB)

static const struct entry { const char *name; void *function; } ENTRIES[] = {
#define ENTRY(name) {#name, (void *)stub_##name},
#define PLAYED(name) {#name, (void *)name},
    DRIVER(ENTRY) PLAYED(cuInit) PLAYED(cuDeviceGet) PLAYED(cuDeviceGetCount) PLAYED(cuDeviceGetAttribute) PLAYED(cuCtxGetCurrent)
    PLAYED(cuCtxSetCurrent) PLAYED(cuDevicePrimaryCtxGetState) PLAYED(cuDevicePrimaryCtxRetain) PLAYED(cuGetErrorString)
};

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    CALLED;
    (void)version, (void)flags;
    for (size_t i = 0; i < sizeof ENTRIES / sizeof *ENTRIES; i++)
        if (!strcmp(ENTRIES[i].name, symbol)) {
            *function = ENTRIES[i].function;
            if (status) *status = cudaDriverEntryPointSuccess;
            return cudaSuccess;
        }
    *function = NULL;
    if (status) *status = cudaDriverEntryPointSymbolNotFound;
    return not_played(symbol);
}
