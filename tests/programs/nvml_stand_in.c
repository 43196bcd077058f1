/* A stand-in for NVML: the functions that the agent calls, with the names, structures and return codes of NVIDIA's
 * documentation (docs.nvidia.com/deploy/nvml-api). STAND_IN_GPUS says what there is: "USE:USED_BYTES:TOTAL_BYTES", one
 * GPU after another, separated by commas; a USE below 0 is a GPU whose utilization is not supported. STAND_IN_LOST is the
 * index of one that has fallen off the bus, STAND_IN_HOLDER the process with a context on the first. STAND_IN_FILE names
 * a file that has what STAND_IN_GPUS would say, and is read again whenever memory or utilization is asked for. What the functions of telemetry say is in
 * STAND_IN_STATUS, by GPU "CELSIUS:MILLIWATTS:LIMIT:MEGAHERTZ:REASONS:CORRECTED:UNCORRECTED:LINKS", separated by commas;
 * a number below 0 is not supported. STAND_IN_XID, "INDEX:NUMBER", is told once. STAND_IN_GONE is the index of a GPU that
 * falls off the bus later; STAND_IN_SLOW_MS is how long each question for memory takes. "MIG-N" is half of GPU N. STAND_IN_FABRIC, "STATE:CLIQUE:BYTE", is the fabric; the UUID is that byte 16 times.
 * Names, structures and constants: nvml.h of API version 13. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9,
       TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
struct device { int use; unsigned long long used, total; };

static struct device devices[16];
static struct device parts[16];
static unsigned int count;
static int is_open;

static int read_devices(void) {
    static char written[1024];
    const char *text = getenv("STAND_IN_GPUS"), *path = getenv("STAND_IN_FILE");
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    if (file != NULL) {
        written[fread(written, 1, sizeof written - 1, file)] = '\0';
        fclose(file);
        text = written;
    }
    if (text == NULL) return DRIVER_NOT_LOADED;
    for (count = 0; count < 16 && *text != '\0'; count++) {
        struct device *each = &devices[count];
        if (sscanf(text, "%d:%llu:%llu", &each->use, &each->used, &each->total) != 3) break;
        text = strchr(text, ',');
        if (text++ == NULL) { count++; break; }
    }
    return SUCCESS;
}

int nvmlInit_v2(void) {
    int code = read_devices();
    if (code == SUCCESS) is_open++; /* as NVML counts */
    return code;
}

int nvmlShutdown(void) {
    if (!is_open) return UNINITIALIZED;
    is_open--;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (!is_open) return UNINITIALIZED;
    if (index >= count) return INVALID_ARGUMENT;
    if (getenv("STAND_IN_LOST") != NULL && (unsigned int)atoi(getenv("STAND_IN_LOST")) == index) return GPU_IS_LOST;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *found) {
    if (!is_open) return UNINITIALIZED;
    *found = count;
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    if (!is_open) return UNINITIALIZED;
    const char *text = getenv("STAND_IN_DRIVER");
    snprintf(version, length, "%s", text == NULL ? "580.95.05" : text);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    if (!is_open) return UNINITIALIZED;
    snprintf(uuid, length, "GPU-%u", (unsigned int)((struct device *)device - devices));
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *found, nvmlProcessInfo_t *processes) {
    const char *holder = getenv("STAND_IN_HOLDER");
    if (!is_open) return UNINITIALIZED;
    *found = 0;
    if (holder != NULL && device == &devices[0]) {
        processes[0].pid = (unsigned int)atoi(holder);
        processes[0].usedGpuMemory = devices[0].used;
        *found = 1;
    }
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned int index;
    if (!is_open) return UNINITIALIZED;
    if (sscanf(uuid, "MIG-%u", &index) == 1 && index < count) {
        parts[index] = devices[index];
        parts[index].use = -1;
        parts[index].used /= 2;
        parts[index].total /= 2;
        *device = &parts[index];
        return SUCCESS;
    }
    if (sscanf(uuid, "GPU-%u", &index) != 1 || index >= count) return NOT_FOUND;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, nvmlUtilization_t *rates) {
    struct device *each = device;
    if (!is_open) return UNINITIALIZED;
    if (getenv("STAND_IN_FILE") != NULL) read_devices();
    if (each->use < 0) return NOT_SUPPORTED;
    rates->gpu = (unsigned int)each->use;
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
    struct device *each = device;
    if (!is_open) return UNINITIALIZED;
    if (getenv("STAND_IN_FILE") != NULL) read_devices();
    if (getenv("STAND_IN_SLOW_MS") != NULL) usleep(1000 * (unsigned int)atoi(getenv("STAND_IN_SLOW_MS")));
    if (getenv("STAND_IN_GONE") != NULL && device == &devices[atoi(getenv("STAND_IN_GONE"))]) return GPU_IS_LOST;
    memory->total = each->total;
    memory->used = each->used;
    memory->free = each->total - each->used;
    return SUCCESS;
}

/* The field of the GPU's STAND_IN_STATUS, or -1. */
static long long read_status(void *device, int field) {
    const char *text = getenv("STAND_IN_STATUS");
    long index = (struct device *)device - devices;
    for (; text != NULL && index > 0; index--) {
        text = strchr(text, ',');
        if (text != NULL) text++;
    }
    for (; text != NULL && field > 0; field--) {
        text = strchr(text, ':');
        if (text != NULL) text++;
    }
    return text == NULL ? -1 : atoll(text);
}

static int give(void *device, int field, unsigned int *found) {
    long long value = read_status(device, field);
    if (!is_open) return UNINITIALIZED;
    if (value < 0) return NOT_SUPPORTED;
    *found = (unsigned int)value;
    return SUCCESS;
}

static int give_long(void *device, int field, unsigned long long *found) {
    long long value = read_status(device, field);
    if (!is_open) return UNINITIALIZED;
    if (value < 0) return NOT_SUPPORTED;
    *found = (unsigned long long)value;
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *part, void **device) {
    struct device *each = part;
    if (each < parts || each >= parts + 16) return INVALID_ARGUMENT;
    *device = &devices[each - parts];
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, unsigned int sensor, unsigned int *found) {
    return sensor == 0 ? give(device, 0, found) : INVALID_ARGUMENT;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *found) { return give(device, 1, found); }

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *found) { return give(device, 2, found); }

int nvmlDeviceGetClockInfo(void *device, unsigned int clock, unsigned int *found) {
    return clock == 1 ? give(device, 3, found) : INVALID_ARGUMENT;
}

/* As a driver before 535: it does not have nvmlDeviceGetCurrentClocksEventReasons. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *found) {
    return give_long(device, 4, found);
}

int nvmlDeviceGetTotalEccErrors(void *device, unsigned int kind, unsigned int counter, unsigned long long *found) {
    return counter == 0 ? give_long(device, kind == 0 ? 5 : 6, found) : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned int link, unsigned int *found) {
    long long links = read_status(device, 7);
    if (links < 0) return NOT_SUPPORTED;
    if (link >= links + 1) return INVALID_ARGUMENT;
    *found = link < links; /* one more is there, and is down */
    return SUCCESS;
}

typedef struct {
    void *device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

static int registered;

int nvmlEventSetCreate(void **set) {
    *set = &registered;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
    if (types != 8 || set != &registered) return INVALID_ARGUMENT;
    registered |= 1 << ((struct device *)device - devices);
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, nvmlEventData_t *data, unsigned int timeout_ms) {
    const char *text = getenv("STAND_IN_XID");
    unsigned int index;
    if (timeout_ms != 0 || text == NULL) return TIMEOUT;
    if (sscanf(text, "%u:%llu", &index, &data->eventData) != 2 || !(registered & 1 << index)) return TIMEOUT;
    unsetenv("STAND_IN_XID");
    data->device = &devices[index];
    data->eventType = 8;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) { return set == &registered ? SUCCESS : INVALID_ARGUMENT; }

typedef struct {
    unsigned char clusterUuid[16];
    int status;
    unsigned int cliqueId;
    unsigned char state;
} nvmlGpuFabricInfo_t;

int nvmlDeviceGetGpuFabricInfo(void *device, nvmlGpuFabricInfo_t *fabric) {
    const char *text = getenv("STAND_IN_FABRIC");
    unsigned int state, byte;
    if (!is_open || device == NULL) return UNINITIALIZED;
    if (text == NULL || sscanf(text, "%u:%u:%x", &state, &fabric->cliqueId, &byte) != 3) return NOT_SUPPORTED;
    memset(fabric->clusterUuid, (int)byte, 16);
    fabric->status = SUCCESS;
    fabric->state = (unsigned char)state;
    return SUCCESS;
}
