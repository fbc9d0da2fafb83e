/* Stands in for libnccl.so.2 and libcuda.so.1 at once: as much of both as headrace calls, over memory of the CPU.

   The signatures are those of nccl.h and cuda.h, so a wrong binding shows. Every call of a ncclComm_t, and what it was given, is written
   down in `calls`. Ranks are threads of one process: those that come with the same unique id are a group, and its sums are real.
   A test sets the variables that begin with fake_ to have things go wrong. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct group {
    ncclUniqueId id;
    int size;
    pthread_barrier_t barrier;
    const float *parts[16];
} group;
typedef struct comm { group *group; int rank; } *ncclComm_t;
typedef int ncclResult_t;

struct call { char name[24]; uint64_t arguments[7]; };
struct call calls[4096];
int num_calls;

int fake_devices = 2;        /* how many the driver sees */
int fake_cuda_error;         /* what every driver call gives back */
char fake_failing[24];       /* the NCCL call that fails, */
int fake_code = 3;           /* and what it gives back */
int fake_async_error;        /* what ncclCommGetAsyncError tells of */
volatile int fake_block;     /* ncclCommInitRank does not return while it is set */
const char *fake_last_error = "";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static group groups[64];
static struct comm comms[256];
static int num_groups, num_comms, num_ids;

static ncclResult_t called(const char *name, const uint64_t *arguments, int count) {
    pthread_mutex_lock(&lock);
    struct call *call = &calls[num_calls++ % 4096];
    memset(call, 0, sizeof *call);
    strcpy(call->name, name);
    memcpy(call->arguments, arguments, count * sizeof *arguments);
    pthread_mutex_unlock(&lock);
    return strcmp(name, fake_failing) ? 0 : fake_code;
}

void fake_reset(void) {
    num_calls = num_groups = num_comms = 0;
    fake_devices = 2, fake_cuda_error = 0, fake_code = 3, fake_async_error = 0, fake_block = 0;
    fake_failing[0] = 0, fake_last_error = "";
}

ncclResult_t ncclGetVersion(int *version) { *version = 22703; return 0; }
const char *ncclGetErrorString(ncclResult_t code) { return code == 3 ? "internal error" : code == 6 ? "remote process exited" : "another error"; }
const char *ncclGetLastError(ncclComm_t comm) { return comm == 0 ? fake_last_error : "asked about a communicator"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    /* With zeros in it, and no byte like another. */
    for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 2);
    id->internal[1] = (char)++num_ids;
    return called("ncclGetUniqueId", 0, 0);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    uint64_t arguments[] = {(uint64_t)size, (uint64_t)rank, (uint8_t)id.internal[1], (uint8_t)id.internal[127]};
    ncclResult_t code = called("ncclCommInitRank", arguments, 4);
    while (fake_block) usleep(1000);
    if (code) return code;
    pthread_mutex_lock(&lock);
    group *found = 0;
    for (int i = 0; i < num_groups; i++)
        if (!memcmp(&groups[i].id, &id, sizeof id)) found = &groups[i];
    if (!found) {
        found = &groups[num_groups++];
        found->id = id, found->size = size;
        pthread_barrier_init(&found->barrier, 0, size);
    }
    struct comm *made = &comms[num_comms++];
    made->group = found, made->rank = rank;
    *comm = made;
    pthread_mutex_unlock(&lock);
    return 0;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, int dtype, int operation, ncclComm_t comm, void *stream) {
    uint64_t arguments[] = {(uint64_t)from, (uint64_t)to, count, (uint64_t)dtype, (uint64_t)operation, (uint64_t)comm, (uint64_t)stream};
    ncclResult_t code = called("ncclAllReduce", arguments, 7);
    if (code || dtype != 7 || operation != 0) return code;
    group *group = comm->group;
    group->parts[comm->rank] = from;
    float sums[count ? count : 1];
    pthread_barrier_wait(&group->barrier);
    for (size_t i = 0; i < count; i++) {
        sums[i] = 0;
        for (int rank = 0; rank < group->size; rank++) sums[i] += group->parts[rank][i];
    }
    pthread_barrier_wait(&group->barrier); /* nobody writes before everybody has read */
    memcpy(to, sums, count * sizeof *sums);
    return 0;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = fake_async_error;
    return called("ncclCommGetAsyncError", (uint64_t[]){(uint64_t)comm}, 1);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return called("ncclCommDestroy", (uint64_t[]){(uint64_t)comm}, 1); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return called("ncclCommAbort", (uint64_t[]){(uint64_t)comm}, 1); }

/* The driver. */

static int devices_or(int result) { return fake_cuda_error ? fake_cuda_error : result; }
static __thread int current = -1;

int fake_current(void) { return current; }
int cuInit(unsigned flags) { return devices_or(flags ? 1 : fake_devices ? 0 : 100); }
int cuDriverGetVersion(int *version) { *version = 13010; return devices_or(0); }
int cuDeviceGetCount(int *count) { *count = fake_devices; return devices_or(0); }
int cuDeviceGet(int *device, int index) { *device = index + 40; return devices_or(index < fake_devices ? 0 : 101); }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return devices_or(0); }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Fake %d", device - 40); return devices_or(0); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)24 << 30; return devices_or(0); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 8 : attribute == 76 ? 9 : -1;
    return devices_or(0);
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device * 100); return devices_or(0); }
int cuCtxSetCurrent(void *context) { current = (int)((intptr_t)context / 100 - 40); return devices_or(0); }
int cuGetErrorString(int code, const char **text) { *text = code == 101 ? "invalid device ordinal" : 0; return *text ? 0 : 1; }
