/* Devices, memory and copies of the simulated CUDA runtime; see fake_cudart.h. */
#include "fake_cudart.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

struct device devices[MAX_DEVICES];
int device_count;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
unsigned long queue_limit;
ns_t copy_ns;
double bytes_per_ns;
_Thread_local int current;
static _Thread_local cudaError_t last_error;

/* ------------------------------------------------------------------------------------------ what was called */

static struct counter *counters;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pid_t owner;
static void start(void);

void count_call(struct counter *counter) {
    pthread_once(&once, start);
    if (!__atomic_load_n(&counter->known, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&counting);
        if (!counter->known) counter->next = counters, counters = counter;
        __atomic_store_n(&counter->known, 1, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&counting);
    }
    __atomic_fetch_add(&counter->count, 1, __ATOMIC_RELAXED);
}

EXPORT size_t fake_cudart_counts(char *text, size_t size) { /* as JSON; how long it is */
    size_t used = 1;
    if (size) snprintf(text, size, "{");
    pthread_mutex_lock(&counting);
    for (struct counter *c = counters; c; c = c->next)
        used += (size_t)snprintf(text && used < size ? text + used : NULL, text && used < size ? size - used : 0, "%s\"%s\": %lu",
                                 c == counters ? "" : ", ", c->name, __atomic_load_n(&c->count, __ATOMIC_RELAXED));
    pthread_mutex_unlock(&counting);
    return used + (size_t)snprintf(text && used < size ? text + used : NULL, text && used < size ? size - used : 0, "}");
}

static void leave_counts(void) {
    const char *path = getenv("FAKE_CUDART_COUNTS");
    FILE *file = path && getpid() == owner ? fopen(path, "we") : NULL; /* not of a forked child */
    if (!file) return;
    size_t size = fake_cudart_counts(NULL, 0) + 1;
    char *text = malloc(size);
    fake_cudart_counts(text, size);
    fprintf(file, "%s\n", text);
    fclose(file);
}

/* ------------------------------------------------------------------------------------------ errors */

cudaError_t quiet(cudaError_t error) { return last_error = error; }

cudaError_t fail(cudaError_t error, const char *function, const char *why) {
    fprintf(stderr, "fake_cudart: %s: %s: %s\n", function, cudaGetErrorName(error), why);
    return quiet(error);
}

cudaError_t not_played(const char *function) {
    return fail(cudaErrorNotSupported, function, "is not played by this simulation");
}

#define ERRORS(X)                                                                                                       \
    X(cudaSuccess, "no error") X(cudaErrorInvalidValue, "invalid argument") X(cudaErrorMemoryAllocation, "out of memory") \
    X(cudaErrorInvalidDevice, "invalid device ordinal") X(cudaErrorNoDevice, "no CUDA-capable device is detected")       \
    X(cudaErrorNotReady, "device not ready") X(cudaErrorNotSupported, "operation not supported")                         \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle") X(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled") \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                             \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")                      \
    X(cudaErrorStreamCaptureMerge, "the operation would result in a merge of separate capture sequences")                \
    X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")                           \
    X(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread")     \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")                        \
    X(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream")    \
    X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")                 \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                               \
    X(cudaErrorIllegalState, "operation is not legal in this state")

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    switch ((int)error) {
#define NAME(code, text) case code: return #code;
        ERRORS(NAME)
    }
    return "an error that is not played";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch ((int)error) {
#define TEXT(code, text) case code: return text;
        ERRORS(TEXT)
    }
    return "an error that is not played";
}

EXPORT cudaError_t cudaGetLastError(void) {
    CALLED;
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* ------------------------------------------------------------------------------------------ devices */

static double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtod(text, NULL) : otherwise;
}

static void uuid(int physical, char bytes[16]) { /* fake_nvml.c's: the number's decimal digits at the end */
    memset(bytes, 0, 16);
    bytes[14] = (char)(physical / 1000 % 10 << 4 | physical / 100 % 10);
    bytes[15] = (char)(physical / 10 % 10 << 4 | physical % 10);
}

static int named(const char *word, int count, int reversed) { /* a word of CUDA_VISIBLE_DEVICES: NVML's number, or -1 */
    char *rest;
    if (!strncasecmp(word, "GPU-", 4)) {
        int found = -1;
        for (int i = 0; i < count; i++) {
            char text[64];
            snprintf(text, sizeof text, "GPU-00000000-0000-0000-0000-00000000%04d", i);
            if (strncasecmp(text, word, strlen(word))) continue;
            if (found >= 0) return -1; /* the start of several */
            found = i;
        }
        return found;
    }
    long number = strtol(word, &rest, 10);
    if (rest == word || number < 0 || number >= count) return -1;
    return reversed ? count - 1 - (int)number : (int)number;
}

static void start(void) {
    int count = (int)setting("FAKE_CUDART_DEVICES", 2);
    const char *order = getenv("CUDA_DEVICE_ORDER"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    int reversed = setting("FAKE_CUDART_REVERSED", 0) && !(order && !strcmp(order, "PCI_BUS_ID"));
    if (count > MAX_DEVICES) count = MAX_DEVICES;
    queue_limit = (unsigned long)setting("FAKE_CUDART_QUEUE", 1024);
    copy_ns = (ns_t)(1e3 * setting("FAKE_CUDART_COPY_US", 10));
    bytes_per_ns = setting("FAKE_CUDART_GB_S", 12);
    if (visible) {
        char copy[1024], *word, *rest;
        snprintf(copy, sizeof copy, "%s", visible);
        for (word = strtok_r(copy, ", ", &rest); word && device_count < MAX_DEVICES; word = strtok_r(NULL, ", ", &rest)) {
            int physical = named(word, count, reversed);
            if (physical < 0) break; /* what comes after it is not visible either */
            devices[device_count++].physical = physical;
        }
    } else
        for (; device_count < count; device_count++) devices[device_count].physical = reversed ? count - 1 - device_count : device_count;
    for (int i = 0; i < device_count; i++) {
        devices[i].total = (size_t)setting("FAKE_CUDART_MEMORY_MIB", 1024) << 20;
        devices[i].kernel_ns = (ns_t)(1e3 * setting("FAKE_CUDART_KERNEL_US", 20));
        devices[i].legacy = (struct CUstream_st){.device = i};
        devices[i].per_thread = (struct CUstream_st){.device = i, .number = -1};
    }
    owner = getpid();
    atexit(leave_counts);
}

EXPORT void fake_cudart_kernel_us(int device, double us) { /* of all if device is negative */
    CALLED;
    for (int i = 0; i < device_count; i++)
        if (device < 0 || device == i) __atomic_store_n(&devices[i].kernel_ns, (ns_t)(us * 1e3), __ATOMIC_RELAXED);
}

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    CALLED;
    *count = device_count;
    return device_count ? cudaSuccess : quiet(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    CALLED;
    *device = current;
    return device_count ? cudaSuccess : quiet(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaSetDevice(int device) {
    CALLED;
    if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice, __func__, "there is no such device");
    current = device;
    devices[device].active = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    CALLED;
    if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice, __func__, "there is no such device");
    *prop = (struct cudaDeviceProp){
        .totalGlobalMem = devices[device].total, .sharedMemPerBlock = 48 << 10, .regsPerBlock = 65536, .warpSize = 32,
        .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {0x7fffffff, 65535, 65535},
        .totalConstMem = 65536, .major = 9, .minor = 0, .textureAlignment = 512, .multiProcessorCount = 132,
        .canMapHostMemory = 1, .concurrentKernels = 1, .asyncEngineCount = 3, .unifiedAddressing = 1,
        .memoryBusWidth = 5120, .l2CacheSize = 50 << 20, .maxThreadsPerMultiProcessor = 2048,
        .streamPrioritiesSupported = 1, .sharedMemPerMultiprocessor = 228 << 10, .regsPerMultiprocessor = 65536,
        .cooperativeLaunch = 1, .sharedMemPerBlockOptin = 227 << 10, .maxBlocksPerMultiProcessor = 32,
        .reservedSharedMemPerBlock = 1024, .pciBusID = devices[device].physical + 1,
    };
    snprintf(prop->name, sizeof prop->name, "Simulated GPU %d", devices[device].physical);
    uuid(devices[device].physical, prop->uuid.bytes);
    return cudaSuccess;
}

EXPORT int cuDeviceGetUuid_v2(char bytes[16], int device) {
    CALLED;
    if (device < 0 || device >= device_count) return cudaErrorInvalidDevice;
    uuid(devices[device].physical, bytes);
    return 0;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    CALLED;
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error) return error;
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)prop.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)prop.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)prop.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMultiProcessorCount: *value = prop.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = prop.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = prop.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = prop.minor; break;
    case cudaDevAttrWarpSize: *value = prop.warpSize; break;
    case cudaDevAttrMaxGridDimX: *value = prop.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = prop.maxGridSize[1]; break;
    case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrManagedMemory: *value = 0; break;
    default: return not_played(__func__);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    CALLED;
    if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice, __func__, "there is no such device");
    snprintf(text, (size_t)size, "0000:%02x:00.0", devices[device].physical + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    CALLED;
    *can = device != peer && setting("FAKE_CUDART_PEERS", 1) != 0;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    CALLED;
    (void)flags;
    return peer >= 0 && peer < device_count ? cudaSuccess : fail(cudaErrorInvalidDevice, __func__, "there is no such device");
}

/* ------------------------------------------------------------------------------------------ memory */

struct block { char *begin; size_t size; int device; struct block *next; }; /* device -1: pinned on the host */
static struct block *blocks;

static struct block *block_of(const void *pointer) { /* with the lock held */
    for (struct block *b = blocks; b; b = b->next)
        if ((const char *)pointer >= b->begin && (const char *)pointer < b->begin + b->size) return b;
    return NULL;
}

static int place_of(const void *pointer) { /* the device, -1 pinned, -2 pageable */
    pthread_mutex_lock(&lock);
    struct block *b = block_of(pointer);
    int place = b ? b->device : -2;
    pthread_mutex_unlock(&lock);
    return place;
}

static void remember(void *begin, size_t size, int device) {
    struct block *b = malloc(sizeof *b);
    *b = (struct block){begin, size, device, blocks};
    blocks = b;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) {
    CALLED;
    struct device *d = &devices[current];
    size = (size + 511) & ~(size_t)511;
    pthread_mutex_lock(&lock);
    cudaError_t error = lost ? (cudaError_t)lost : device_count ? unsafe(__func__) : cudaErrorNoDevice;
    void *made = MAP_FAILED;
    if (!error) {
        d->active = 1;
        if (d->used + size <= d->total) made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) error = cudaErrorMemoryAllocation;
        else {
            d->used += size;
            remember(made, size, current);
            *pointer = made;
        }
    }
    pthread_mutex_unlock(&lock);
    return error ? quiet(error) : cudaSuccess;
}

static cudaError_t release(void *pointer, int pinned, const char *function) {
    if (!pointer) return cudaSuccess;
    pthread_mutex_lock(&lock);
    cudaError_t error = unsafe(function);
    struct block **place = &blocks, *found = NULL;
    while (*place && (*place)->begin != pointer) place = &(*place)->next;
    if (!error && *place && ((*place)->device < 0) == pinned) {
        found = *place;
        *place = found->next;
        if (!pinned) devices[found->device].used -= found->size;
    }
    pthread_mutex_unlock(&lock);
    if (error) return quiet(error);
    if (!found) return fail(cudaErrorInvalidValue, function, "a pointer that was not allocated so");
    if (!pinned) wait_until(device_end(found->device), function);
    munmap(found->begin, found->size);
    free(found);
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *pointer) {
    CALLED;
    return release(pointer, 0, __func__);
}

EXPORT cudaError_t cudaFreeHost(void *pointer) {
    CALLED;
    return release(pointer, 1, __func__);
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    CALLED;
    (void)flags;
    void *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation, __func__, "the host has none");
    pthread_mutex_lock(&lock);
    cudaError_t error = unsafe(__func__);
    if (!error) remember(*pointer = made, size, -1);
    pthread_mutex_unlock(&lock);
    return error ? quiet(error) : cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    CALLED;
    *total = devices[current].total;
    *available = *total - devices[current].used;
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    CALLED;
    int place = place_of(pointer);
    *found = (struct cudaPointerAttributes){.device = place >= 0 ? place : place == -1 ? current : cudaInvalidDeviceId};
    found->type = place >= 0 ? cudaMemoryTypeDevice : place == -1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    if (place >= 0) found->devicePointer = (void *)pointer;
    else found->hostPointer = place == -1 ? (void *)pointer : NULL;
    if (place == -1) found->devicePointer = (void *)pointer;
    return cudaSuccess;
}

void do_copies(const struct op *op) { /* at once: what is copied from is never changed by a kernel here */
    if (op->kind == COPY && op->bytes) memmove(op->to, op->from, op->bytes);
    if (op->kind == SET && op->bytes) memset(op->to, op->value, op->bytes);
}

/* ------------------------------------------------------------------------------------------ copies */

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream, int wait, const char *function) {
    int target = place_of(to), source = place_of(from);
    ns_t ended;
    if (target < 0 && source < 0) { /* the host alone */
        memmove(to, from, bytes);
        return cudaSuccess;
    }
    double rate = target == source ? 1000.0 : bytes_per_ns; /* within a device: as fast as its memory */
    const char *name = target < 0 ? "to host" : source == target ? "within" : source < 0 ? "to device" : "to peer";
    struct op op = {.kind = COPY, .name = name, .cost = copy_ns + (ns_t)(bytes / rate), .bytes = bytes, .to = to, .from = from};
    cudaError_t error = queue(stream, &op, &ended);
    if (error) return quiet(error);
    /* To pageable memory it waits; from there it returns when the bytes are staged, which is done here by now. */
    if (ended && (target == -2 || (wait && (target == -1 || source == -1)))) wait_until(ended, function);
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    CALLED;
    (void)kind;
    return copy(to, from, bytes, stream, 0, __func__);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    CALLED;
    pthread_mutex_lock(&lock);
    cudaError_t error = unsafe(__func__);
    pthread_mutex_unlock(&lock);
    if (error) return quiet(error);
    if (kind != cudaMemcpyDeviceToDevice && place_of(from) == -2) { /* it waits for what the stream has to do already */
        pthread_mutex_lock(&lock);
        ns_t before = time_line(&devices[current].legacy);
        pthread_mutex_unlock(&lock);
        wait_until(before, __func__);
    }
    return copy(to, from, bytes, NULL, 1, __func__);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int target, const void *from, int source, size_t bytes, cudaStream_t stream) {
    CALLED;
    if (place_of(to) != target || place_of(from) != source) return fail(cudaErrorInvalidValue, __func__, "not of that device");
    return copy(to, from, bytes, stream, 0, __func__);
}

static cudaError_t set(void *to, int value, size_t bytes, cudaStream_t stream) {
    struct op op = {.kind = SET, .name = "memset", .cost = copy_ns / 4 + (ns_t)(bytes / 1000.0), .bytes = bytes, .to = to, .value = value};
    if (place_of(to) == -2) return fail(cudaErrorInvalidValue, "cudaMemset", "memory of the host");
    cudaError_t error = queue(stream, &op, NULL);
    return error ? quiet(error) : cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    CALLED;
    return set(to, value, bytes, stream);
}

EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    CALLED;
    return set(to, value, bytes, NULL);
}
