// The part of UCX's C interface (ucp, API 1.22 and later) that this package uses, in its own words, so that it
// builds without UCX's headers. abi/check.c compares it with them.
#ifndef KVPORT_UCX_CAPI_H
#define KVPORT_UCX_CAPI_H

#include <stddef.h>
#include <stdint.h>

typedef int8_t ux_status;  // ucs_status_t, a packed enum
typedef void *ux_handle;   // every object is an opaque pointer
typedef void *ux_request;  // NULL: done; an error if it is -1 to -99; else a request

enum { UX_MAJOR = 1, UX_MINOR = 22 };
enum { UX_OK = 0, UX_IN_PROGRESS = 1, UX_BUSY = -15, UX_LAST = -100 };

// Parameters come in structs of which UCX reads only the fields that the mask names. Each is as long as
// UCX's own.
enum { UX_PARAMS_FEATURES = 1, UX_FEATURE_TAG = 1, UX_FEATURE_RMA = 2, UX_FEATURE_WAKEUP = 16 };
typedef struct {
	uint64_t mask, features;
	uint64_t rest[9];
} ux_params;

enum { UX_WORKER_THREADS = 1, UX_SERIALIZED = 1 };
typedef struct {
	uint64_t mask;
	int threads;
	uint64_t rest[24];
} ux_worker_params;

enum { UX_MAP_ADDRESS = 1, UX_MAP_LENGTH = 2 };
typedef struct {
	uint64_t mask;
	void *address;
	size_t length;
	uint64_t rest[3];
} ux_map_params;

enum { UX_EP_ADDRESS = 1, UX_EP_ERRORS = 2, UX_ERRORS_NONE = 0, UX_ERRORS_PEER = 1 };
typedef struct {
	uint64_t mask;
	const void *address;
	int errors;
	uint64_t rest[10];
} ux_ep_params;

enum { UX_OP_FLAGS = 16, UX_OP_MEMORY = 256, UX_OP_NOT_AT_ONCE = 65536, UX_CLOSE_FORCE = 1 };
typedef struct {
	uint32_t mask, flags;
	uint64_t rest[7];
	void *memory;
	uint64_t more[3];
} ux_op;

typedef struct {
	uint64_t tag;
	size_t length;
} ux_received;

// UX_TABLE calls X with the result, the name and the parameters of every function.
#define UX_TABLE(X) \
	X(const char *, ucp_get_version_string, (void)) \
	X(const char *, ucs_status_string, (ux_status)) \
	X(ux_status, ucp_config_read, (const char *, const char *, ux_handle *)) \
	X(ux_status, ucp_config_modify, (ux_handle, const char *, const char *)) \
	X(void, ucp_config_release, (ux_handle)) \
	X(ux_status, ucp_init_version, (unsigned, unsigned, const ux_params *, ux_handle, ux_handle *)) \
	X(void, ucp_cleanup, (ux_handle)) \
	X(ux_status, ucp_worker_create, (ux_handle, const ux_worker_params *, ux_handle *)) \
	X(void, ucp_worker_destroy, (ux_handle)) \
	X(ux_status, ucp_worker_get_address, (ux_handle, void **, size_t *)) \
	X(void, ucp_worker_release_address, (ux_handle, void *)) \
	X(ux_status, ucp_worker_get_efd, (ux_handle, int *)) \
	X(ux_status, ucp_worker_arm, (ux_handle)) \
	X(unsigned, ucp_worker_progress, (ux_handle)) \
	X(ux_status, ucp_mem_map, (ux_handle, const ux_map_params *, ux_handle *)) \
	X(ux_status, ucp_mem_unmap, (ux_handle, ux_handle)) \
	X(ux_status, ucp_rkey_pack, (ux_handle, ux_handle, void **, size_t *)) \
	X(void, ucp_rkey_buffer_release, (void *)) \
	X(void, ucp_rkey_destroy, (ux_handle)) \
	X(ux_status, ucp_ep_rkey_unpack, (ux_handle, const void *, ux_handle *)) \
	X(ux_status, ucp_ep_create, (ux_handle, const ux_ep_params *, ux_handle *)) \
	X(ux_request, ucp_ep_close_nbx, (ux_handle, const ux_op *)) \
	X(ux_request, ucp_ep_flush_nbx, (ux_handle, const ux_op *)) \
	X(ux_request, ucp_put_nbx, (ux_handle, const void *, size_t, uint64_t, ux_handle, const ux_op *)) \
	X(ux_request, ucp_get_nbx, (ux_handle, void *, size_t, uint64_t, ux_handle, const ux_op *)) \
	X(ux_request, ucp_tag_send_nbx, (ux_handle, const void *, size_t, uint64_t, const ux_op *)) \
	X(ux_request, ucp_tag_recv_nbx, (ux_handle, void *, size_t, uint64_t, uint64_t, const ux_op *)) \
	X(ux_status, ucp_request_check_status, (void *)) \
	X(ux_status, ucp_tag_recv_request_test, (void *, ux_received *)) \
	X(void, ucp_request_cancel, (ux_handle, void *)) \
	X(void, ucp_request_free, (void *))

typedef struct ux_table {
	struct ux_table *next;
#define X(result, name, args) result(*name) args;
	UX_TABLE(X)
#undef X
} ux_table;

// One transfer of memory, kvport_ucx_move's: which way, from where, to where.
typedef struct {
	int get;
	void *local;
	size_t len;
	uint64_t remote;
	ux_handle memory; // of local, or NULL
	ux_handle key;
} ux_move;

// kvport_ucx_load returns the functions of the library at path, for the life of the process. On a failure it
// returns NULL, sets *reason to what dlopen or dlsym said, to be freed, and *symbol to the name of the symbol
// that is missing, if it is one.
ux_table *kvport_ucx_load(const char *path, char **reason, const char **symbol);
const char *kvport_ucx_version(ux_table *t);
const char *kvport_ucx_text(ux_table *t, int status);
// kvport_ucx_worker makes a context and a worker; transports and devices are UCX's lists, or "".
int kvport_ucx_worker(ux_table *t, const char *transports, const char *devices, ux_handle *context, ux_handle *worker);
void kvport_ucx_free_worker(ux_table *t, ux_handle context, ux_handle worker);
int kvport_ucx_address(ux_table *t, ux_handle worker, void **address, size_t *len);
void kvport_ucx_free_address(ux_table *t, ux_handle worker, void *address);
int kvport_ucx_fd(ux_table *t, ux_handle worker, int *fd);
int kvport_ucx_arm(ux_table *t, ux_handle worker);
int kvport_ucx_progress(ux_table *t, ux_handle worker);
int kvport_ucx_map(ux_table *t, ux_handle context, void *address, size_t len, ux_handle *memory);
int kvport_ucx_unmap(ux_table *t, ux_handle context, ux_handle memory);
int kvport_ucx_pack(ux_table *t, ux_handle context, ux_handle memory, void **key, size_t *len);
void kvport_ucx_free_packed(ux_table *t, void *key);
int kvport_ucx_unpack(ux_table *t, ux_handle endpoint, const void *packed, ux_handle *key);
void kvport_ucx_free_key(ux_table *t, ux_handle key);
int kvport_ucx_connect(ux_table *t, ux_handle worker, const void *address, int peer_errors, ux_handle *endpoint);
// These start something and set *request if it goes on; their result is UX_IN_PROGRESS then.
int kvport_ucx_close(ux_table *t, ux_handle endpoint, uint32_t flags, ux_request *request);
int kvport_ucx_flush(ux_table *t, ux_handle endpoint, ux_request *request);
int kvport_ucx_move(ux_table *t, ux_handle endpoint, const ux_move *m, ux_request *request);
int kvport_ucx_send(ux_table *t, ux_handle endpoint, const void *data, size_t len, uint64_t tag, ux_request *request);
int kvport_ucx_receive(ux_table *t, ux_handle worker, void *data, size_t len, uint64_t tag, uint64_t mask, ux_request *request);
// kvport_ucx_poll makes progress and looks at a request, which is freed if it has ended; received is set if it
// is not NULL and the request was a receive that went well.
int kvport_ucx_poll(ux_table *t, ux_handle worker, ux_request request, ux_received *received);
void kvport_ucx_cancel(ux_table *t, ux_handle worker, ux_request request);

#endif
