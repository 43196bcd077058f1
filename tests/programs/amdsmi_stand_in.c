/* A stand-in for AMD's amdsmi: the functions that the agent calls, with the names, structures and constants of amdsmi.h of
 * AMD SMI 24.7 (ROCm 6.3). Two sockets of one GPU each; what they say is in STAND_IN_AMD, by GPU
 * "PER_CENT:USED_BYTES:TOTAL_BYTES:CELSIUS:MEGAHERTZ:CORRECTED:UNCORRECTED", separated by commas. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 1, NOT_SUPPORTED = 2 };
typedef struct { uint32_t gfx_activity, umc_activity, mm_activity, reserved[13]; } amdsmi_engine_usage_t;
typedef struct { uint32_t clk, min_clk, max_clk; uint8_t locked, deep_sleep; uint32_t reserved[4]; } amdsmi_clk_info_t;
typedef struct { uint64_t correctable_count, uncorrectable_count, deferred_count, reserved[5]; } amdsmi_error_count_t;

static int gpus[2];
static int is_open;

static uint64_t read_field(void *gpu, int field) {
    const char *text = getenv("STAND_IN_AMD");
    if (gpu == &gpus[1]) text = strchr(text, ',') + 1;
    for (; field > 0; field--) text = strchr(text, ':') + 1;
    return strtoull(text, NULL, 10);
}

int amdsmi_init(uint64_t flags) {
    if (flags != 2 || getenv("STAND_IN_AMD") == NULL) return INVALID;
    is_open = 1;
    return SUCCESS;
}

int amdsmi_shut_down(void) {
    is_open = 0;
    return SUCCESS;
}

int amdsmi_get_socket_handles(uint32_t *count, void **handles) {
    if (!is_open || *count < 2) return INVALID;
    *count = 2;
    handles[0] = &gpus[0];
    handles[1] = &gpus[1];
    return SUCCESS;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
    if (*count < 1) return INVALID;
    *count = 1;
    handles[0] = socket;
    return SUCCESS;
}

int amdsmi_get_gpu_activity(void *gpu, amdsmi_engine_usage_t *info) {
    info->gfx_activity = (uint32_t)read_field(gpu, 0);
    return SUCCESS;
}

int amdsmi_get_gpu_memory_usage(void *gpu, int kind, uint64_t *used) {
    if (kind != 0) return INVALID;
    *used = read_field(gpu, 1);
    return SUCCESS;
}

int amdsmi_get_gpu_memory_total(void *gpu, int kind, uint64_t *total) {
    if (kind != 0) return INVALID;
    *total = read_field(gpu, 2);
    return SUCCESS;
}

int amdsmi_get_temp_metric(void *gpu, int sensor, int metric, int64_t *temperature) {
    if (sensor != 1 || metric != 0) return NOT_SUPPORTED;
    *temperature = (int64_t)read_field(gpu, 3);
    return SUCCESS;
}

int amdsmi_get_clk_info(void *gpu, int kind, amdsmi_clk_info_t *info) {
    if (kind != 0) return INVALID;
    info->clk = (uint32_t)read_field(gpu, 4);
    return SUCCESS;
}

int amdsmi_get_gpu_total_ecc_count(void *gpu, amdsmi_error_count_t *errors) {
    errors->correctable_count = read_field(gpu, 5);
    errors->uncorrectable_count = read_field(gpu, 6);
    return SUCCESS;
}
