// Stands in for NCCL, or with -DHCCL for HCCL and Synapse: processes of one host exchange through a file in memory.
// STUB_STUCK_AFTER=n: the stream is busy for ever after n questions. STUB_ASYNC_ERROR: and then an operation has failed.
// STUB_INIT_HANGS: nobody joins. STUB_LEAST_BYTES=n: all ranks get an error for less than n bytes.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef HCCL
#define NAME(name) hccl##name
#define ID_BYTES 1032 // another size than NCCL's
#else
#define NAME(name) nccl##name
#define ID_BYTES 128
#endif

enum { MAX_RANKS = 4, SLOT = 1 << 20, PATIENCE_MS = 30000 };
enum { INVALID = 4, GONE = 6 };
typedef struct { char path[ID_BYTES]; } unique_id;

typedef struct {
  atomic_int joined, arrived, generation, is_over;
  atomic_int full[MAX_RANKS][MAX_RANKS];
  char slots[MAX_RANKS][SLOT], mail[MAX_RANKS][SLOT];
} meeting;

typedef struct {
  int rank, size;
  meeting *at;
} comm;

static int wait_until(comm *c, atomic_int *value, int wanted, int is_equal) {
  for (int ms = 0; ms < 10 * PATIENCE_MS; ++ms) {
    if ((atomic_load(value) == wanted) == is_equal)
      return 0;
    if (atomic_load(&c->at->is_over))
      return GONE;
    usleep(100);
  }
  return GONE;
}

static int barrier(comm *c) {
  const int generation = atomic_load(&c->at->generation);
  if (atomic_fetch_add(&c->at->arrived, 1) + 1 == c->size) {
    atomic_store(&c->at->arrived, 0);
    atomic_fetch_add(&c->at->generation, 1);
    return 0;
  }
  return wait_until(c, &c->at->generation, generation, 0);
}

static size_t bytes_of(int dtype) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return dtype >= 0 && dtype < 10 ? sizes[dtype] : 0;
}

// Device memory has addresses that no host memory has.
#ifdef HCCL
#define DEVICE_BASE (UINT64_C(1) << 60)
static int is_device(const void *address) { return (uint64_t)address >= DEVICE_BASE; }
static char *memory(const void *address) { return (char *)((uint64_t)address - DEVICE_BASE); }
#else
static int is_device(const void *address) { return address != NULL; }
static char *memory(const void *address) { return (char *)address; }
#endif

static float from_bfloat16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define REDUCE(type, get, put)                                                                                        \
  for (size_t i = 0; i < count; ++i) {                                                                                \
    type result = get(((type##_slot *)c->at->slots[0])[i]);                                                           \
    for (int rank = 1; rank < c->size; ++rank) {                                                                      \
      const type next = get(((type##_slot *)c->at->slots[rank])[i]);                                                  \
      result = op == 2 ? (next > result ? next : result) : op == 3 ? (next < result ? next : result)                            \
               : op == 1 ? result * next : result + next;                                                             \
    }                                                                                                                 \
    if (op == 4)                                                                                                      \
      result /= (type)c->size;                                                                                        \
    ((type##_slot *)to)[i] = put(result);                                                                             \
  }
#define SAME(x) (x)
typedef float float_slot;
typedef double double_slot;
typedef int32_t int32_t_slot;
typedef int64_t int64_t_slot;

static int reduce_slots(comm *c, char *to, size_t count, int dtype, int op) {
  switch (dtype) {
  case 2:
    REDUCE(int32_t, SAME, SAME) return 0;
  case 4:
    REDUCE(int64_t, SAME, SAME) return 0;
  case 7:
    REDUCE(float, SAME, SAME) return 0;
  case 8:
    REDUCE(double, SAME, SAME) return 0;
  case 9:
    for (size_t i = 0; i < count; ++i) { // sums only; added in float32, rounded once
      float sum = 0;
      for (int rank = 0; rank < c->size; ++rank)
        sum += from_bfloat16(((uint16_t *)c->at->slots[rank])[i]);
      ((uint16_t *)to)[i] = to_bfloat16(sum);
    }
    return op == 0 ? 0 : INVALID;
  default:
    return INVALID;
  }
}

static int is_too_small(size_t bytes) {
  const char *least = getenv("STUB_LEAST_BYTES");
  return least != NULL && bytes < (size_t)atol(least);
}

// Each rank's `bytes` from `from` are in its slot, between two barriers, while `body` runs.
#define EXCHANGE(from, bytes, body)                                                                                   \
  if (is_too_small(bytes))                                                                                            \
    return INVALID;                                                                                                   \
  for (size_t start = 0, part; start < (bytes); start += part) {                                                      \
    part = (bytes) - start < SLOT ? (bytes) - start : SLOT;                                                           \
    memcpy(c->at->slots[c->rank], memory(from) + start, part);                                                        \
    if (barrier(c) != 0)                                                                                              \
      return GONE;                                                                                                    \
    body;                                                                                                             \
    if (barrier(c) != 0)                                                                                              \
      return GONE;                                                                                                    \
  }

int NAME(GetUniqueId)(unique_id *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->path, sizeof id->path, "/dev/shm/voltaic-stub-%d-%d", getpid(), rand());
  const int file = open(id->path, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, sizeof(meeting)) != 0)
    return INVALID;
  return close(file);
}

int NAME(CommInitRank)(comm **made, int size, unique_id id, int rank) {
  if (getenv("STUB_INIT_HANGS")) {
    unlink(id.path);
    sleep(1000);
  }
  const int file = open(id.path, O_RDWR);
  if (file < 0 || size > MAX_RANKS)
    return INVALID;
  comm *c = *made = malloc(sizeof *c);
  c->rank = rank;
  c->size = size;
  c->at = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  atomic_fetch_add(&c->at->joined, 1);
  const int result = wait_until(c, &c->at->joined, size, 1);
  if (rank == 0)
    unlink(id.path);
  return result;
}

int NAME(AllReduce)(const void *from, void *to, size_t count, int dtype, int op, comm *c, void *stream) {
  (void)stream;
  const size_t unit = bytes_of(dtype);
  if (!is_device(from) || !is_device(to) || unit == 0 || (op == 4 && sizeof(unique_id) > 128))
    return INVALID;
  int result = 0;
  EXCHANGE(from, count * unit, result |= reduce_slots(c, memory(to) + start, part / unit, dtype, op));
  return result;
}

int NAME(Broadcast)(const void *from, void *to, size_t count, int dtype, int root, comm *c, void *stream) {
  (void)stream;
  if (!is_device(from) || !is_device(to) || bytes_of(dtype) == 0)
    return INVALID;
  EXCHANGE(from, count * bytes_of(dtype), memcpy(memory(to) + start, c->at->slots[root], part));
  return 0;
}

int NAME(AllGather)(const void *from, void *to, size_t count, int dtype, comm *c, void *stream) {
  (void)stream;
  const size_t bytes = count * bytes_of(dtype);
  if (!is_device(from) || !is_device(to) || bytes_of(dtype) == 0)
    return INVALID;
  EXCHANGE(from, bytes, for (int rank = 0; rank < c->size; ++rank)
                            memcpy(memory(to) + rank * bytes + start, c->at->slots[rank], part));
  return 0;
}

int NAME(ReduceScatter)(const void *from, void *to, size_t count, int dtype, int op, comm *c, void *stream) {
  (void)stream;
  const size_t unit = bytes_of(dtype);
  if (!is_device(from) || !is_device(to) || unit == 0)
    return INVALID;
  char *scrap = malloc(SLOT);
  int result = 0;
  for (int owner = 0; owner < c->size; ++owner) {
    const char *piece = (const char *)from + owner * count * unit;
    EXCHANGE(piece, count * unit,
             result |= reduce_slots(c, owner == c->rank ? memory(to) + start : scrap, part / unit, dtype, op));
  }
  free(scrap);
  return result;
}

static int send_now(const void *from, size_t count, int dtype, int peer, comm *c) {
  const size_t bytes = count * bytes_of(dtype);
  atomic_int *full = &c->at->full[c->rank][peer];
  for (size_t start = 0; start < bytes; start += SLOT) {
    memcpy(c->at->mail[c->rank], memory(from) + start, bytes - start < SLOT ? bytes - start : SLOT);
    atomic_store(full, 1);
    if (wait_until(c, full, 0, 1) != 0)
      return GONE;
  }
  return 0;
}

static int receive_now(void *to, size_t count, int dtype, int peer, comm *c) {
  const size_t bytes = count * bytes_of(dtype);
  atomic_int *full = &c->at->full[peer][c->rank];
  for (size_t start = 0; start < bytes; start += SLOT) {
    if (wait_until(c, full, 1, 1) != 0)
      return GONE;
    memcpy(memory(to) + start, c->at->mail[peer], bytes - start < SLOT ? bytes - start : SLOT);
    atomic_store(full, 0);
  }
  return 0;
}

// What is asked between GroupStart and GroupEnd is done by the latter, sends beside receives.
typedef struct {
  const void *from;
  void *to;
  size_t count;
  int dtype, peer;
  comm *c;
} transfer;
static transfer sends[MAX_RANKS], receives[MAX_RANKS];
static int is_grouped, num_sends, num_receives;

static void *send_all(void *result) {
  for (int i = 0; i < num_sends; ++i)
    *(int *)result |= send_now(sends[i].from, sends[i].count, sends[i].dtype, sends[i].peer, sends[i].c);
  return NULL;
}

int NAME(Send)(const void *from, size_t count, int dtype, int peer, comm *c, void *stream) {
  (void)stream;
  if (!is_device(from) || peer == c->rank)
    return INVALID;
  if (!is_grouped)
    return send_now(from, count, dtype, peer, c);
  sends[num_sends++] = (transfer){from, NULL, count, dtype, peer, c};
  return 0;
}

int NAME(Recv)(void *to, size_t count, int dtype, int peer, comm *c, void *stream) {
  (void)stream;
  if (!is_device(to) || peer == c->rank)
    return INVALID;
  if (!is_grouped)
    return receive_now(to, count, dtype, peer, c);
  receives[num_receives++] = (transfer){NULL, to, count, dtype, peer, c};
  return 0;
}

int NAME(GroupStart)(void) {
  is_grouped = 1;
  return 0;
}

int NAME(GroupEnd)(void) {
  is_grouped = 0;
  int sent = 0, received = 0;
  pthread_t sender;
  pthread_create(&sender, NULL, send_all, &sent);
  for (int i = 0; i < num_receives; ++i) {
    const transfer *it = &receives[i];
    received |= receive_now(it->to, it->count, it->dtype, it->peer, it->c);
  }
  pthread_join(sender, NULL);
  num_sends = num_receives = 0;
  return sent | received;
}

int NAME(Reduce)(const void *from, void *to, size_t count, int dtype, int op, int root, comm *c, void *stream) {
  (void)stream;
  const size_t unit = bytes_of(dtype);
  if (!is_device(from) || !is_device(to) || unit == 0 || (op == 4 && sizeof(unique_id) > 128))
    return INVALID;
  int result = 0;
  char *scrap = malloc(SLOT);
  EXCHANGE(from, count * unit,
           result |= reduce_slots(c, c->rank == root ? memory(to) + start : scrap, part / unit, dtype, op));
  free(scrap);
  return result;
}

int NAME(CommGetAsyncError)(comm *c, int *result) {
  (void)c;
  *result = getenv("STUB_ASYNC_ERROR") ? GONE : 0;
  return 0;
}

int NAME(CommAbort)(comm *c) {
  atomic_store(&c->at->is_over, 1);
  fprintf(stderr, "stub: rank %d aborts\n", c->rank);
  return 0;
}

int NAME(CommDestroy)(comm *c) {
  munmap(c->at, sizeof(meeting));
  free(c);
  return 0;
}

const char *NAME(GetErrorString)(int result) {
  return result == INVALID ? "stub: invalid argument" : result == GONE ? "stub: a rank is gone" : "stub: no error";
}

#ifdef HCCL
int synDeviceMalloc(uint32_t device, uint64_t bytes, uint64_t address, uint32_t flags, uint64_t *buffer) {
  (void)device, (void)address, (void)flags;
  *buffer = (uint64_t)malloc(bytes) + DEVICE_BASE;
  return 0;
}

int synDeviceFree(uint32_t device, uint64_t buffer, uint32_t flags) {
  (void)device, (void)flags;
  free(memory((void *)buffer));
  return 0;
}

int synHostMalloc(uint32_t device, uint64_t bytes, uint32_t flags, void **buffer) {
  (void)device, (void)flags;
  *buffer = malloc(bytes);
  return 0;
}

int synHostFree(uint32_t device, const void *buffer, uint32_t flags) {
  (void)device, (void)flags;
  free((void *)buffer);
  return 0;
}

int synMemCopyAsync(void *stream, uint64_t from, uint64_t bytes, uint64_t to, int direction) {
  (void)stream;
  const int is_up = direction == 0;
  if (is_device((void *)from) == is_up || is_device((void *)to) != is_up)
    return 1;
  memcpy(is_up ? memory((void *)to) : (char *)to, is_up ? (char *)from : memory((void *)from), bytes);
  return 0;
}

int synStreamCreateGeneric(void **stream, uint32_t device, uint32_t flags) {
  (void)device, (void)flags;
  *stream = malloc(1);
  return 0;
}

int synStreamQuery(void *stream) {
  (void)stream;
  static int asked = 0;
  const char *after = getenv("STUB_STUCK_AFTER");
  return after != NULL && ++asked > atoi(after) ? 4 : 0;
}
#endif
