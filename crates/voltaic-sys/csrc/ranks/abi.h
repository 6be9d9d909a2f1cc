// Ranks: stores, groups, libraries for collectives. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

// ---- distributed ----

typedef struct vt_store vt_store; // keys and values that all ranks see; may be used by several threads
typedef struct vt_group vt_group; // ranks that communicate; one thread at a time, and all ranks in the same order
typedef struct vt_work vt_work;   // an operation under way; keeps its tensors alive

// Connects to the server at host:port. If listener is not negative it is the server's socket, which listens at that port
// already and which the store closes. Without is_server, listener is not read; with is_server and without a listener, the
// server listens on all addresses, and port 0 lets the system choose a port.
vt_error *vt_store_tcp(const char *host, uint16_t port, int32_t is_server, int32_t listener, int64_t timeout_ms,
                       vt_store **store, uint16_t *actual_port);

enum { VT_SECRET_BYTES = 32, VT_SEAL_BYTES = 32 };
// Writes the seal of a value under a key, VT_SEAL_BYTES long; called from any thread, and by libtorch, too.
typedef void (*vt_seal)(const uint8_t *secret, const uint8_t *key, size_t key_len, const uint8_t *value, size_t len,
                        uint8_t *seal);
// The same store, whose values have a seal made of `secret` (VT_SECRET_BYTES long, which is copied), and which refuses values
// without it.
vt_error *vt_store_sealed(const vt_store *store, const uint8_t *secret, vt_seal seal, vt_store **sealed);
// The same store, with `prefix` before each key.
vt_error *vt_store_with_prefix(const vt_store *store, const char *prefix, vt_store **prefixed);
vt_error *vt_store_set(const vt_store *store, const char *key, const uint8_t *value, size_t len);
// Waits for a key; take(data, ...) gets its value, once, during the call.
vt_error *vt_store_get(const vt_store *store, const char *key, int64_t timeout_ms,
                       void (*take)(void *data, const uint8_t *value, size_t len), void *data);
vt_error *vt_store_add(const vt_store *store, const char *key, int64_t amount, int64_t *sum);
vt_error *vt_store_has(const vt_store *store, const char *key, int32_t *has);
void vt_store_free(vt_store *store);

// Gloo over `interface`, or over the interface that has `address` if that is null. Returns when all ranks are connected.
vt_error *vt_group_gloo(const vt_store *store, int32_t rank, int32_t size, int64_t timeout_ms, const char *interface,
                        const char *address, vt_group **group);
void vt_group_free(vt_group *group);
// How long operations of the group wait for other ranks from now on.
vt_error *vt_group_set_timeout(const vt_group *group, int64_t timeout_ms);

enum vt_reduce_op : int32_t {
  VT_REDUCE_SUM = 0,
  VT_REDUCE_AVG = 1,
  VT_REDUCE_MIN = 2,
  VT_REDUCE_MAX = 3,
  VT_REDUCE_PRODUCT = 4
};

// Each starts an operation on contiguous tensors. Those of an emulated HPU are reached where they are.
vt_error *vt_group_all_reduce(const vt_group *group, vt_tensor tensor, int32_t op, vt_work **work);
vt_error *vt_group_broadcast(const vt_group *group, vt_tensor tensor, int32_t root, vt_work **work);
vt_error *vt_group_all_gather(const vt_group *group, vt_tensor input, vt_tensor output, vt_work **work);
vt_error *vt_group_reduce_scatter(const vt_group *group, vt_tensor input, vt_tensor output, int32_t op,
                                  vt_work **work);
vt_error *vt_group_send(const vt_group *group, vt_tensor tensor, int32_t peer, vt_work **work);
vt_error *vt_group_recv(const vt_group *group, vt_tensor tensor, int32_t peer, vt_work **work);
// On ranks other than `root` the tensor holds anything afterwards.
vt_error *vt_group_reduce(const vt_group *group, vt_tensor tensor, int32_t root, int32_t op, vt_work **work);
// `output` is read on `root` alone: the inputs of all ranks, stacked.
vt_error *vt_group_gather(const vt_group *group, vt_tensor input, vt_tensor output, int32_t root, vt_work **work);
// `input` is read on `root` alone: what all ranks get, stacked.
vt_error *vt_group_scatter(const vt_group *group, vt_tensor input, vt_tensor output, int32_t root, vt_work **work);
// Rows of the first dimension for each rank, and from each rank; as many splits as ranks.
vt_error *vt_group_all_to_all(const vt_group *group, vt_tensor input, const int64_t *input_splits, vt_tensor output,
                              const int64_t *output_splits, vt_work **work);
vt_error *vt_group_barrier(const vt_group *group, vt_work **work);
// The sum over the ranks, at once. Its gradient is the sum over the ranks of the gradients.
vt_error *vt_group_all_reduce_sum_function(const vt_group *group, vt_tensor input, vt_tensor *output);
// Waits until the operation is done, at most as long as the group's time-out.
vt_error *vt_work_wait(vt_work *work);
// Waits first, unless that has been done.
void vt_work_free(vt_work *work);

// ---- libraries with NCCL's C interface ----

// Bytes that hold the id of a communicator of any library.
enum { VT_COLLECTIVE_ID_BYTES = 4096 };

// Functions of NCCL, or of HCCL and Synapse, with the types of NCCL's and Synapse's headers. Those of Synapse are null
// for NCCL, whose operations take the tensors' own memory.
typedef struct vt_collective_library {
  const char *name; // lives as long as the library
  int32_t has_average;
  void (*get_unique_id)(void), (*init_rank)(void);
  void (*all_reduce)(void), (*broadcast)(void), (*all_gather)(void), (*reduce_scatter)(void), (*reduce)(void);
  void (*send)(void), (*recv)(void), (*group_start)(void), (*group_end)(void);
  void (*async_error)(void), (*abort)(void); // may be null
  void (*destroy)(void), (*error_text)(void);
  void (*device_malloc)(void), (*device_free)(void), (*host_malloc)(void), (*host_free)(void), (*copy)(void);
  void (*stream_create)(void), (*stream_query)(void);
} vt_collective_library;

// A new id for a communicator, VT_COLLECTIVE_ID_BYTES long, to be given to all its ranks.
vt_error *vt_collective_id(const vt_collective_library *library, uint8_t *id);
// Joins the communicator; returns when all ranks have. The library is copied; it must stay loaded.
vt_error *vt_collective_join(const vt_collective_library *library, const uint8_t *id, int32_t rank, int32_t size,
                             int32_t device_type, int32_t device_index, int64_t timeout_ms, vt_group **group);

// views[i] = grad of params[i] * scale; zeros where there is no gradient.
vt_error *vt_bucket_fill(const vt_tensor *params, const vt_tensor *views, size_t len, double scale);
// The gradient of params[i] is views[i] from now on.
vt_error *vt_bucket_adopt(const vt_tensor *params, const vt_tensor *views, size_t len);
// reached[i] = 1 if backward from `root` would give leaves[i] a gradient.
vt_error *vt_reaches_leaves(vt_tensor root, const vt_tensor *leaves, size_t len, uint8_t *reached);

} // extern "C"
