/* As much of NVML as regrow asks, for two GPUs of a kind; what the second one tells is in the environment. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;

static int gpus[2];
static int fallen;   /* the second one, off the bus */
static int listened; /* to the second one's errors, too */

static long told(void *gpu, const char *name, long usual) {
    const char *value = gpu == &gpus[1] ? getenv(name) : NULL;
    return value ? atol(value) : usual;
}

int nvmlInitWithFlags(unsigned flags) { return getenv("NO_DRIVER") ? 9 : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    const char *lost = getenv("LOST"); /* its number */
    if (lost && index == (unsigned)atol(lost)) return GPU_IS_LOST;
    *gpu = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetName(void *gpu, char *name, unsigned size) { strncpy(name, "NVIDIA H100", size); return SUCCESS; }
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%d", gpu == &gpus[1]);
    return fallen && gpu == &gpus[1] ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetCpuAffinity(void *gpu, unsigned words, unsigned long long *mask) {
    memset(mask, 0, words * sizeof *mask);
    if (told(gpu, "SOCKET", -1) < 0)
        return NOT_SUPPORTED;
    mask[1] = 5ull << 62, mask[0] = 1; /* 0 and 126 */
    return SUCCESS;
}
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *celsius) {
    *celsius = told(gpu, "CELSIUS", 50);
    return fallen && gpu == &gpus[1] ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) {
    *milliwatts = told(gpu, "MILLIWATTS", 300000);
    return *milliwatts ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *mhz) {
    *mhz = kind == 1 ? told(gpu, "SM_MHZ", 1980) : 1;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *gpu, unsigned long long *reasons) {
    *reasons = told(gpu, "REASONS", 0);
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *errors) {
    if (kind == 1 && counter == 0)
        *errors = told(gpu, "UNCORRECTED", 0);
    else
        *errors = 7; /* corrected, or since it was made */
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = 3, *uncorrected = 1;
    *pending = told(gpu, "PENDING", 0), *failed = told(gpu, "FAILED", 0);
    return SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *gpu, int *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *active) {
    *active = link < told(gpu, "NVLINKS", 18);
    return link < 18 ? SUCCESS : 2;
}
int nvmlEventSetCreate(void **events) { *events = gpus; return SUCCESS; }
int nvmlEventSetFree(void *events) { listened = 0; return SUCCESS; }
int nvmlDeviceRegisterEvents(void *gpu, unsigned long long kinds, void *events) {
    listened |= gpu == &gpus[1];
    return kinds == 8 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlEventSetWait_v2(void *events, Event *event, unsigned milliseconds) {
    static int waited;
    long losing = told(&gpus[1], "LOSING", 0); /* waits that say so, before there is an event */
    if (waited++ == 0) return TIMEOUT;
    fallen = getenv("FALLEN") != NULL;
    if (getenv("NEIGHBOUR")) { /* says nothing of the first one as long as the second one is listened to */
        *event = (Event){&gpus[0], 8, atol(getenv("NEIGHBOUR")), 0, 0};
        return listened ? GPU_IS_LOST : SUCCESS;
    }
    if (waited - 1 <= losing) return GPU_IS_LOST;
    if (!getenv("XID") || waited - 2 != losing) return TIMEOUT;
    *event = (Event){&gpus[1], 8, atol(getenv("XID")), 0, 0};
    return SUCCESS;
}
