/* A libnvidia-ml.so.1 without a driver: the real pynvml talks to it.
 *
 * NVIDIA_FAKE_STATE names a file that is read at each call. First line "ok", "hang" or the nvmlReturn_t that nvmlInit
 * answers. What hangs writes its process id into a file beside.
 * then one line per device: total_mib used_mib lost(0|1, 2: no permission) pid:used_mib,pid:used_mib (or "-") and, where it is not 0,
 * how busy it is in percent; then what differs from a bare card: name=A_B reserved=MIB mig=1 cores=N sm=MHZ mem=MHZ
 * bus=BITS capability=MAJOR.MINOR links=N:MBPS pcie=GENERATION:LANES slices=MIB,0,MIB (the memory of each MIG slot; 0
 * is an empty one).
 * Numbers are those of nvml.h: 0 success, 1 uninitialised, 2 invalid argument, 3 not supported, 4 no permission,
 * 6 not found, 7 insufficient size, 15 GPU is lost. A handle is 1 + index, of an instance 256 * that + 1 + slot.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEVICES_MAX = 16, PROCESSES_MAX = 8, SLOTS = 7 };
static const unsigned long long MIB = 1ull << 20;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct {
    unsigned field, scope;
    long long at, latency;
    unsigned type, answer;
    union { unsigned number; unsigned long long wide; } value;
} Field;
typedef struct {
    Memory memory;
    int lost;
    unsigned busy, processes;
    Process process[PROCESSES_MAX];
    char name[64];
    unsigned reserved, mig, cores, sm, mem, bus, major, minor, links, mbps, generation, lanes;
    unsigned slices[SLOTS];
} Device;

static Device devices[DEVICES_MAX];
static unsigned count;
static int init_answer, initialised;

static void describe(Device *device, char *words) {
    char *rest = NULL;
    for (char *word = strtok_r(words, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
        if (sscanf(word, "name=%63s", device->name) == 1)
            for (char *at = device->name; *at; at++) *at = *at == '_' ? ' ' : *at;
        sscanf(word, "reserved=%u", &device->reserved);
        sscanf(word, "mig=%u", &device->mig);
        sscanf(word, "cores=%u", &device->cores);
        sscanf(word, "sm=%u", &device->sm);
        sscanf(word, "mem=%u", &device->mem);
        sscanf(word, "bus=%u", &device->bus);
        sscanf(word, "capability=%u.%u", &device->major, &device->minor);
        sscanf(word, "links=%u:%u", &device->links, &device->mbps);
        sscanf(word, "slices=%u,%u,%u,%u,%u,%u,%u", &device->slices[0], &device->slices[1], &device->slices[2],
               &device->slices[3], &device->slices[4], &device->slices[5], &device->slices[6]);
        sscanf(word, "pcie=%u:%u", &device->generation, &device->lanes);
    }
}

static void load(void) {
    char first[32], line[512], listed[256], words[512];
    unsigned long long total, used;
    unsigned busy;
    int lost;
    const char *path = getenv("NVIDIA_FAKE_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    count = 0;
    init_answer = 9; /* driver not loaded */
    if (!file || fscanf(file, "%31s\n", first) != 1) return;
    if (!strcmp(first, "hang")) {
        snprintf(words, sizeof words, "%s.hangs", path);
        FILE *hangs = fopen(words, "w");
        if (hangs) fprintf(hangs, "%d", getpid()), fclose(hangs);
        sleep(600);
    }
    init_answer = strcmp(first, "ok") ? atoi(first) : 0;
    while (count < DEVICES_MAX && fgets(line, sizeof line, file)) {
        busy = 0;
        if (sscanf(line, "%llu %llu %d %255s %u", &total, &used, &lost, listed, &busy) < 4) break;
        Device *device = &devices[count++];
        *device = (Device){.memory = {total * MIB, (total - used) * MIB, used * MIB}, .lost = lost, .busy = busy};
        strcpy(device->name, "Fake H200");
        strcpy(words, line);
        describe(device, words);
        for (char *part = strtok(listed, ","); part && device->processes < PROCESSES_MAX; part = strtok(NULL, ",")) {
            Process *process = &device->process[device->processes];
            if (sscanf(part, "%u:%llu", &process->pid, &process->used) == 2) {
                process->used *= MIB;
                device->processes++;
            }
        }
    }
    fclose(file);
}

static int fault(Device *device) { return device->lost == 2 ? 4 : device->lost ? 15 : 0; }

static unsigned slot_of(void *handle) { return (unsigned long)handle >> 8 ? (unsigned long)handle & 255 : 0; }

static int find(void *handle, Device **device) {
    unsigned long whole = (unsigned long)handle, index = (whole >> 8 ? whole >> 8 : whole) - 1;
    if (!initialised) return 1;
    load();
    if (index >= count) return 2;
    *device = &devices[index];
    return fault(*device);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); initialised = init_answer == 0; return init_answer; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { initialised = 0; return 0; }

const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : code == 999 ? "Unknown Error" : "error";
}

int nvmlDeviceGetCount_v2(unsigned *found) { if (!initialised) return 1; load(); *found = count; return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index >= count) return 2;
    *handle = (void *)(unsigned long)(index + 1);
    return fault(&devices[index]);
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *found) { (void)handle; *found = SLOTS; return 0; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned slot, void **instance) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    if (slot >= SLOTS || !device->mig || !device->slices[slot]) return 6;
    *instance = (void *)((unsigned long)handle * 256 + slot + 1);
    return 0;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **handle) {
    if (!slot_of(instance)) return 2;
    *handle = (void *)((unsigned long)instance >> 8);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    unsigned long index, slot;
    if (!initialised) return 1;
    load();
    if (sscanf(uuid, "MIG-%08lx-%lu", &index, &slot) == 2) *handle = (void *)((index + 1) * 256 + slot + 1);
    else if (sscanf(uuid, "GPU-%08lx-aaaa", &index) == 1) *handle = (void *)(index + 1);
    else return 6;
    return index < count ? fault(&devices[index]) : 6;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    Device *device;
    int answer = find(handle, &device);
    if (answer == 0) snprintf(name, length, slot_of(handle) ? "%s MIG 1g" : "%s", device->name);
    return answer;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    if (slot_of(handle)) snprintf(uuid, length, "MIG-%08lx-%u", (unsigned long)(device - devices), slot_of(handle) - 1);
    else snprintf(uuid, length, "GPU-%08lx-aaaa", (unsigned long)(device - devices));
    return answer;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    *memory = device->memory;
    if (slot_of(handle)) {
        unsigned long long total = device->slices[slot_of(handle) - 1] * MIB;
        *memory = (Memory){total, total, 0};
    }
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    Device *device;
    int answer = find(handle, &device);
    if (answer == 0) *rates = (Utilization){.gpu = device->busy};
    return answer;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *size, Process *processes) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    unsigned room = *size;
    *size = device->processes;
    if (room < device->processes || (device->processes && !processes)) return 7;
    for (unsigned i = 0; i < device->processes; i++) processes[i] = device->process[i];
    return 0;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, Memory2 *memory) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    if (slot_of(handle)) return 3;
    unsigned long long reserved = device->reserved * MIB;
    *memory = (Memory2){memory->version, device->memory.total, reserved, device->memory.free, device->memory.used};
    return 0;
}

/* What a bare card does not know is 3: not supported. */
#define NUMBER(function, field)                                             \
    int function(void *handle, unsigned *found) {                           \
        Device *device;                                                     \
        int answer = find(handle, &device);                                 \
        if (answer) return answer;                                          \
        *found = device->field;                                             \
        return device->field ? 0 : 3;                                       \
    }
NUMBER(nvmlDeviceGetNumGpuCores, cores)
NUMBER(nvmlDeviceGetMemoryBusWidth, bus)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, generation)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, lanes)

int nvmlDeviceGetMaxClockInfo(void *handle, unsigned kind, unsigned *mhz) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    *mhz = kind == 2 ? device->mem : device->sm;
    return *mhz ? 0 : 3;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *next) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    *now = *next = device->mig;
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    *major = device->major;
    *minor = device->minor;
    return device->major ? 0 : 3;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    *active = link < device->links;
    return device->links ? 0 : 3;
}

int nvmlDeviceGetFieldValues(void *handle, int count, Field *fields) {
    Device *device;
    int answer = find(handle, &device);
    if (answer) return answer;
    for (int i = 0; i < count; i++) { /* 90: NVLink's common speed in MB/s */
        fields[i].answer = fields[i].field == 90 && device->links ? 0 : 3;
        fields[i].value.number = device->mbps;
    }
    return 0;
}
