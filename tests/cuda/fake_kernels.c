/* Kernels of the simulated CUDA runtime: known by their names, launched, never run; see fake_cudart.h. */
#include "fake_cudart.h"

#include <stdlib.h>

static struct function { const void *host; const char *name; } *functions;
static size_t function_count, function_room;
static pthread_mutex_t sorting = PTHREAD_MUTEX_INITIALIZER;

static const char *name_of(const void *host) {
    size_t low = 0, high = function_count;
    static int sorted;
    pthread_mutex_lock(&sorting);
    if (!sorted) {
        int compare(const void *a, const void *b) {
            const struct function *x = a, *y = b;
            return x->host < y->host ? -1 : x->host > y->host;
        }
        qsort(functions, function_count, sizeof *functions, compare);
        sorted = 1;
    }
    pthread_mutex_unlock(&sorting);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (functions[middle].host == host) return functions[middle].name;
        if (functions[middle].host < host) low = middle + 1;
        else high = middle;
    }
    return "?";
}

EXPORT void **__cudaRegisterFatBinary(void *image) {
    (void)image;
    static void *handle;
    return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT char __cudaInitModule(void **handle) { return handle != NULL; }
EXPORT void __cudaRegisterVar(void **handle, char *var, char *address, const char *name, int ext, size_t size, int constant, int global) {
    (void)handle, (void)var, (void)address, (void)name, (void)ext, (void)size, (void)constant, (void)global;
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid, void *bid,
                                   void *block, void *grid, int *warp) {
    (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    if (function_count == function_room) functions = realloc(functions, (function_room = function_room * 2 + 4096) * sizeof *functions);
    functions[function_count++] = (struct function){host, name};
}

static _Thread_local struct { dim3 grid, block; size_t shared; void *stream; } configuration;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    *kernel = (cudaKernel_t)host;
    return cudaSuccess;
}

cudaError_t launch(const char *name, cudaStream_t stream) {
    struct op op = {.kind = KERNEL, .name = name};
    int device = stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread ? stream->device : current;
    op.cost = __atomic_load_n(&devices[device].kernel_ns, __ATOMIC_RELAXED);
    cudaError_t error = queue(stream, &op, NULL);
    return error ? quiet(error) : cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    CALLED;
    (void)grid, (void)block, (void)args, (void)shared;
    return launch(name_of(host), stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    CALLED;
    (void)grid, (void)block, (void)args, (void)shared;
    return launch(name_of(kernel), stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args) {
    CALLED;
    (void)args;
    return launch(name_of(host), config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *host) {
    CALLED;
    (void)host;
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90,
                                         .maxDynamicSharedSizeBytes = 48 << 10};
    return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value) {
    CALLED;
    (void)host, (void)attribute, (void)value;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *host, int size, size_t shared, unsigned flags) {
    CALLED;
    (void)host, (void)shared, (void)flags;
    *count = size > 0 && size <= 2048 ? 2048 / size : 1;
    return cudaSuccess;
}
