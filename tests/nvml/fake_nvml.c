/*
 * A stand-in for libnvidia-ml.so.1 that does as it is told, so that the real pynvml can be tried against every
 * failure without a GPU. Signatures, numbers and struct layouts are those of NVML's public interface.
 *
 * FAKE_NVML_CONTROL names a file that is read again at every call:
 *     gpus COUNT
 *     rule FUNCTION DEVICE CODE [DELAY_S]     FUNCTION may end in *, DEVICE is an index, * or - (no device);
 *                                             a delay of -1 lasts until the rule is gone; the last rule that fits wins
 *     set DEVICE KEY VALUE                    what the functions answer; see `number` and `text` below
 * FAKE_NVML_LOG names a file to which every call appends two lines: TIME B|E THREAD FUNCTION DEVICE CODE.
 *
 * What kills a real driver aborts here, after a line that starts with FATAL: a null handle, nvmlShutdown (or the end of
 * the process) while another call is in flight.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64
#define MAX_LINES 512
typedef unsigned long long u64;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, VERSION = 25 };

struct device { int index; int mig; }; /* mig: the instance's index, -1 for a whole GPU */
static struct device gpus[MAX_GPUS], instances[MAX_GPUS][8];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[MAX_LINES][192];
static int line_count, initialised;
static int in_flight;
static double loaded;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void note(const char *format, ...) {
    const char *path = getenv("FAKE_NVML_LOG");
    char text[256];
    va_list args;
    va_start(args, format);
    int size = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        if (write(fd, text, size) < 0) { /* nobody to tell */
        }
        close(fd);
    }
}

static void fatal(const char *what, const char *function) {
    note("FATAL %s in %s\n", what, function);
    abort();
}

static void read_control(void) { /* with the lock held */
    const char *path = getenv("FAKE_NVML_CONTROL");
    FILE *file = path ? fopen(path, "re") : NULL;
    line_count = 0;
    if (!file) return;
    while (line_count < MAX_LINES && fgets(lines[line_count], sizeof lines[0], file)) line_count++;
    fclose(file);
}

static int fits(const char *pattern, const char *text) {
    size_t n = strlen(pattern);
    if (n && pattern[n - 1] == '*') return !strncmp(pattern, text, n - 1);
    return !strcmp(pattern, text);
}

static void device_word(int device, char *word, size_t size) {
    if (device < 0) snprintf(word, size, "-");
    else snprintf(word, size, "%d", device);
}

static int rule_for(const char *function, int device, double *delay) {
    char word[16], pattern[96], which[16];
    int code = OK, found;
    double wait;
    *delay = 0;
    device_word(device, word, sizeof word);
    pthread_mutex_lock(&lock);
    read_control();
    for (int i = 0; i < line_count; i++) {
        wait = 0;
        if (sscanf(lines[i], "rule %95s %15s %d %lf", pattern, which, &found, &wait) >= 3 && fits(pattern, function) &&
            fits(which, word)) {
            code = found;
            *delay = wait;
        }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int setting(int device, const char *key, char *value, size_t size) {
    char word[16], which[16], name[64], found[128];
    int any = 0;
    device_word(device, word, sizeof word);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < line_count; i++)
        if (sscanf(lines[i], "set %15s %63s %127[^\n]", which, name, found) == 3 && fits(which, word) && !strcmp(name, key)) {
            snprintf(value, size, "%s", found);
            any = 1;
        }
    pthread_mutex_unlock(&lock);
    return any;
}

static double number(int device, const char *key, double otherwise) {
    char value[128];
    return setting(device, key, value, sizeof value) ? strtod(value, NULL) : otherwise;
}

static int gpu_count(void) {
    int count = 2;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < line_count; i++) sscanf(lines[i], "gpus %d", &count);
    pthread_mutex_unlock(&lock);
    return count < MAX_GPUS ? count : MAX_GPUS;
}

static int enter(const char *function, int device) {
    double delay, until;
    __sync_fetch_and_add(&in_flight, 1);
    int code = rule_for(function, device, &delay);
    note("%.6f B %ld %s %d %d\n", now(), (long)syscall(SYS_gettid), function, device, code);
    until = now() + delay;
    while (delay < 0 || now() < until) { /* a rule that is taken back while it holds a call up lets it go */
        double left = delay < 0 ? 0.02 : until - now();
        usleep((useconds_t)((left < 0.02 ? left > 0 ? left : 0 : 0.02) * 1e6));
        double again;
        code = rule_for(function, device, &again);
        if (again == 0 && delay != 0) break;
        delay = again;
    }
    return code;
}

static int leave(const char *function, int device, int code) {
    note("%.6f E %ld %s %d %d\n", now(), (long)syscall(SYS_gettid), function, device, code);
    __sync_fetch_and_sub(&in_flight, 1);
    return code;
}

static int of(const struct device *handle, const char *function) {
    if (!handle) fatal("a null handle", function);
    return handle->index;
}

#define PLAIN(...)                                    \
    {                                                 \
        int rc = enter(__func__, -1);                 \
        if (!rc && !initialised) rc = UNINITIALIZED;  \
        if (!rc) __VA_ARGS__;                          \
        return leave(__func__, -1, rc);               \
    }
#define DEVICE(...)                                   \
    {                                                 \
        int d = of(h, __func__);                      \
        int rc = enter(__func__, d);                  \
        if (!rc && !initialised) rc = UNINITIALIZED;  \
        if (!rc) __VA_ARGS__;                          \
        return leave(__func__, d, rc);                \
    }
#define UINT(name, key, otherwise) \
    EXPORT int name(struct device *h, unsigned *value) DEVICE({ *value = (unsigned)number(d, key, otherwise); })

__attribute__((constructor)) static void begin(void) {
    loaded = now();
    for (int i = 0; i < MAX_GPUS; i++) {
        gpus[i] = (struct device){i, -1};
        for (int j = 0; j < 8; j++) instances[i][j] = (struct device){i, j};
    }
}

__attribute__((destructor)) static void end(void) {
    if (in_flight) fatal("the process ended with a call in flight", "exit");
}

/* ------------------------------------------------------------------------------------------ start and stop */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int rc = enter(__func__, -1);
    if (!rc) __sync_fetch_and_add(&initialised, 1);
    return leave(__func__, -1, rc);
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    int rc = enter(__func__, -1);
    if (in_flight > 1) fatal("shut down with a call in flight", __func__);
    if (!rc && !initialised) rc = UNINITIALIZED;
    if (!rc) __sync_fetch_and_sub(&initialised, 1);
    return leave(__func__, -1, rc);
}

EXPORT const char *nvmlErrorString(int code) {
    (void)code;
    return "an error";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size) PLAIN({ snprintf(text, size, "570.00.fake"); })

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) PLAIN({ *count = gpu_count(); })

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **handle) {
    int rc = enter(__func__, (int)index);
    if (!rc && !initialised) rc = UNINITIALIZED;
    if (!rc && (int)index >= gpu_count()) rc = INVALID;
    if (!rc) *handle = number(index, "null_handle", 0) ? NULL : &gpus[index];
    return leave(__func__, (int)index, rc);
}

EXPORT int nvmlDeviceGetUUID(struct device *h, char *text, unsigned size) DEVICE({
    char value[128];
    if (h->mig >= 0) snprintf(text, size, "MIG-00000000-0000-0000-%04d-00000000%04d", h->mig, d);
    else if (setting(d, "uuid", value, sizeof value)) snprintf(text, size, "%s", value);
    else snprintf(text, size, "GPU-00000000-0000-0000-0000-00000000%04d", d);
})

EXPORT int nvmlDeviceGetName(struct device *h, char *text, unsigned size) DEVICE({
    char value[128];
    snprintf(text, size, "%s", setting(d, "name", value, sizeof value) ? value : "NVIDIA H100 Fake");
})

/* ------------------------------------------------------------------------------------------ what it does */

struct rates { unsigned gpu, memory; };
EXPORT int nvmlDeviceGetUtilizationRates(struct device *h, struct rates *r) DEVICE({
    r->gpu = (unsigned)number(d, "util", 40 + d);
    r->memory = (unsigned)number(d, "mem_util", 12);
})

struct memory { u64 total, free, used; };
EXPORT int nvmlDeviceGetMemoryInfo(struct device *h, struct memory *m) DEVICE({
    m->total = (u64)number(d, "mem_total", 80.0 * (1 << 30));
    m->used = (u64)number(d, "mem_used", 10.0 * (1 << 30));
    if (h->mig >= 0) m->total /= 8, m->used = 1ull << 30;
    else m->used += (u64)number(d, "mem_reserved", 512.0 * (1 << 20)); /* the old call counts it as used */
    m->free = m->total - m->used;
})

struct memory2 { unsigned version; u64 total, reserved, free, used; };
EXPORT int nvmlDeviceGetMemoryInfo_v2(struct device *h, struct memory2 *m) DEVICE({
    if (m->version != 0x02000028) rc = VERSION;
    else {
        m->total = (u64)number(d, "mem_total", 80.0 * (1 << 30));
        m->used = (u64)number(d, "mem_used", 10.0 * (1 << 30));
        m->reserved = (u64)number(d, "mem_reserved", 512.0 * (1 << 20));
        if (h->mig >= 0) m->total /= 8, m->used = 1ull << 30, m->reserved = 0;
        m->free = m->total - m->used - m->reserved;
    }
})

EXPORT int nvmlDeviceGetTemperature(struct device *h, unsigned sensor, unsigned *value) DEVICE({
    if (sensor) rc = INVALID;
    else *value = (unsigned)number(d, "temperature", 60 + d);
})

struct temperature { unsigned version, sensor; int value; };
EXPORT int nvmlDeviceGetTemperatureV(struct device *h, struct temperature *t) DEVICE({
    if (t->version != 0x100000C) rc = VERSION;
    else t->value = (int)number(d, "temperature", 60 + d);
})

EXPORT int nvmlDeviceGetTemperatureThreshold(struct device *h, unsigned which, unsigned *value) DEVICE({
    if (which > 7) rc = INVALID;
    else *value = (unsigned)number(d, "slowdown", 87);
})

struct margin { unsigned version; int value; };
EXPORT int nvmlDeviceGetMarginTemperature(struct device *h, struct margin *m) DEVICE({
    if (m->version != 0x1000008) rc = VERSION;
    else m->value = (int)number(d, "margin", 25);
})

UINT(nvmlDeviceGetPowerUsage, "power_mw", 250500)
UINT(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", 700000)
UINT(nvmlDeviceGetPowerManagementLimit, "power_management_limit_mw", 650000)
UINT(nvmlDeviceGetFanSpeed, "fan", 30)
UINT(nvmlDeviceGetPersistenceMode, "persistence", 1)

EXPORT int nvmlDeviceGetFanSpeed_v2(struct device *h, unsigned fan, unsigned *value) DEVICE({
    if (fan) rc = INVALID;
    else *value = (unsigned)number(d, "fan", 30);
})

EXPORT int nvmlDeviceGetTotalEnergyConsumption(struct device *h, u64 *value) DEVICE({
    *value = (u64)(number(d, "energy_mj", 123456789) + (now() - loaded) * 1000 * number(d, "energy_w", 0));
})

EXPORT int nvmlDeviceGetClockInfo(struct device *h, unsigned clock, unsigned *value) DEVICE({
    *value = (unsigned)(clock == 2 ? number(d, "mem_clock", 2619) : number(d, "sm_clock", 1980));
})

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(struct device *h, u64 *value) DEVICE({
    *value = (u64)number(d, "throttle", 0);
})
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *h, u64 *value) DEVICE({
    *value = (u64)number(d, "throttle", 0);
})

/* ------------------------------------------------------------------------------------------ traffic */

EXPORT int nvmlDeviceGetPcieThroughput(struct device *h, unsigned counter, unsigned *value) DEVICE({
    *value = (unsigned)(counter ? number(d, "pcie_rx_kb", 2000) : number(d, "pcie_tx_kb", 1000));
})

UINT(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", 5)
UINT(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
UINT(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_max", 5)
UINT(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max", 16)

union value { double d; unsigned u; u64 ull; };
struct field { unsigned id, scope; long long timestamp, latency; unsigned type; int rc; union value value; };
EXPORT int nvmlDeviceGetFieldValues(struct device *h, int count, struct field *fields) DEVICE({
    for (int i = 0; i < count; i++) {
        struct field *f = &fields[i];
        double kib_s = number(d, "nvlink_kib_s", 0);
        f->rc = OK;
        f->type = 3;
        f->timestamp = (long long)(now() * 1e6);
        if (kib_s > 0 && f->scope == ~0u && (f->id == 138 || f->id == 139)) /* sent, received, over all links, in KiB */
            f->value.ull = (u64)((now() - loaded) * kib_s * (f->id == 139 ? 2 : 1));
        else if (f->scope >= number(d, "nvlinks", 0)) f->rc = NOT_SUPPORTED; /* the rest is of one link */
        else if (f->id == 165) f->value.u = f->scope < number(d, "nvlinks_up", 18); /* its state */
        else if (f->id == 161) f->value.u = (unsigned)number(d, "nvlink_replays", 0);
        else if (f->id == 162) f->value.u = 0; /* recoveries */
        else f->rc = NOT_SUPPORTED;
    }
})

/* ------------------------------------------------------------------------------------------ health */

EXPORT int nvmlDeviceGetTotalEccErrors(struct device *h, unsigned type, unsigned counter, u64 *value) DEVICE({
    if (counter > 1) rc = INVALID;
    else *value = (u64)(type ? number(d, "ecc_uncorrected", 0) : number(d, "ecc_corrected", 3));
})

EXPORT int nvmlDeviceGetRemappedRows(struct device *h, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed) DEVICE({
    *a = (unsigned)number(d, "remapped_corrected", 1);
    *b = (unsigned)number(d, "remapped_uncorrected", 2);
    *pending = *failed = 0;
})

EXPORT int nvmlDeviceGetRetiredPages(struct device *h, unsigned cause, unsigned *count, u64 *pages) DEVICE({
    unsigned have = (unsigned)number(d, cause ? "retired_double" : "retired_single", cause ? 1 : 0);
    if (*count < have || !pages) rc = have ? TOO_SMALL : OK;
    else for (unsigned i = 0; i < have; i++) pages[i] = i;
    *count = have;
})

struct set { int device, unread; };
EXPORT int nvmlEventSetCreate(struct set **set) PLAIN({ *set = calloc(1, sizeof **set); })
EXPORT int nvmlEventSetFree(struct set *set) PLAIN({ free(set); })
EXPORT int nvmlDeviceRegisterEvents(struct device *h, u64 types, struct set *set) DEVICE({
    (void)types;
    set->device = d;
    set->unread = 1;
})
struct event { struct device *device; u64 type, data; unsigned gi, ci; };
EXPORT int nvmlEventSetWait_v2(struct set *set, struct event *event, unsigned timeout) {
    (void)timeout;
    int rc = enter(__func__, set->device);
    double xid = number(set->device, "xid", 0);
    if (!rc && !initialised) rc = UNINITIALIZED;
    if (!rc && (!xid || !set->unread)) rc = TIMEOUT;
    if (!rc) {
        *event = (struct event){&gpus[set->device], 8, (u64)xid, ~0u, ~0u};
        set->unread = 0;
    }
    return leave(__func__, set->device, rc);
}

/* ------------------------------------------------------------------------------------------ processes */

struct process { unsigned pid; u64 used; unsigned gi, ci; };
static int list(int d, const char *key, unsigned *count, struct process *out) {
    char value[128];
    char *word, *rest;
    struct process found[16];
    unsigned have = 0;
    if (setting(d, key, value, sizeof value))
        for (word = strtok_r(value, ",", &rest); word && have < 16; word = strtok_r(NULL, ",", &rest)) {
            unsigned pid = 0;
            long long used = -1; /* no number: the driver does not tell */
            sscanf(word, "%u:%lld", &pid, &used);
            found[have++] = (struct process){pid, (u64)used, ~0u, ~0u};
        }
    int fit = out && *count >= have;
    *count = have;
    if (!fit) return have ? TOO_SMALL : OK;
    memcpy(out, found, have * sizeof *out);
    return OK;
}
#define PROCESSES(name, key) \
    EXPORT int name(struct device *h, unsigned *count, struct process *out) DEVICE({ rc = list(d, key, count, out); })
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")

/* ------------------------------------------------------------------------------------------ MIG */

EXPORT int nvmlDeviceGetMigMode(struct device *h, unsigned *current, unsigned *pending) DEVICE({
    if (number(d, "mig", -1) < 0) rc = NOT_SUPPORTED;
    else *current = *pending = number(d, "mig", -1) > 0;
})
EXPORT int nvmlDeviceGetMaxMigDeviceCount(struct device *h, unsigned *count) DEVICE({
    *count = number(d, "mig", 0) > 0 ? 7 : 0;
})
EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(struct device *h, unsigned index, struct device **handle) DEVICE({
    if (index >= (unsigned)number(d, "mig", 0) || index > 7) rc = NOT_FOUND;
    else *handle = &instances[d][index];
})

/* ------------------------------------------------------------------------------------------ GPM */

struct support { unsigned version, supported; };
EXPORT int nvmlGpmQueryDeviceSupport(struct device *h, struct support *s) DEVICE({
    if (s->version != 1) rc = VERSION;
    else s->supported = number(d, "gpm", 1) > 0;
})
struct sample { int device; double at; };
EXPORT int nvmlGpmSampleAlloc(struct sample **sample) PLAIN({ *sample = calloc(1, sizeof **sample); })
EXPORT int nvmlGpmSampleFree(struct sample *sample) PLAIN({ free(sample); })
EXPORT int nvmlGpmSampleGet(struct device *h, struct sample *sample) DEVICE({
    sample->device = d;
    sample->at = now();
})
struct metric { unsigned id; int rc; double value; const char *names[3]; };
struct metrics { unsigned version, count; struct sample *first, *second; struct metric metrics[]; };
EXPORT int nvmlGpmMetricsGet(struct metrics *m) {
    int d = m->first ? m->first->device : -1;
    int rc = enter(__func__, d);
    if (!rc && !initialised) rc = UNINITIALIZED;
    if (!rc && (m->version != 1)) rc = VERSION;
    if (!rc && (!m->first || !m->second || m->first == m->second || m->first->at >= m->second->at)) rc = INVALID;
    for (unsigned i = 0; !rc && i < m->count; i++) {
        char key[32];
        snprintf(key, sizeof key, "gpm%u", m->metrics[i].id);
        double value = number(d, key, -1);
        m->metrics[i].rc = value < 0 ? NOT_SUPPORTED : OK;
        m->metrics[i].value = value;
    }
    return leave(__func__, d, rc);
}
