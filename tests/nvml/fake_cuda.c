/*
 * A stand-in for the two functions of libcuda.so.1 that tell which GPU a device is. It has four GPUs and numbers them
 * the other way round than fake_nvml.c does, as CUDA may (the fastest first); CUDA_VISIBLE_DEVICES picks by its own
 * numbers and is read when it is asked, like CUDA does when it starts.
 */
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { GPUS = 4, INVALID_DEVICE = 101 };

EXPORT int cuDeviceGet(int *device, int ordinal) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int number = ordinal;
    if (visible) {
        for (; visible && ordinal; ordinal--) {
            visible = strchr(visible, ',');
            if (visible) visible++;
        }
        if (!visible) return INVALID_DEVICE;
        number = atoi(visible);
    }
    if (number < 0 || number >= GPUS) return INVALID_DEVICE;
    *device = number;
    return 0;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[15] = (unsigned char)(GPUS - 1 - device); /* NVML's index, in the last digits of its UUID */
    return 0;
}
