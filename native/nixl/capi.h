// The part of the C interface of libnixl_capi.so (NIXL 1.5.1) that this package uses, in its own words:
// the wheel ships no header. abi/check.c compares it with the vendor's.
#ifndef KVPORT_NIXL_CAPI_H
#define KVPORT_NIXL_CAPI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int nx_status;   // the vendor's is an enum with negative members, so an int
typedef void *nx_handle; // every handle is an opaque pointer

enum { NX_IN_PROGRESS = 1 };
enum { NX_STRICT = 1 }; // thread_sync: one call at a time

typedef struct {
	bool progress_thread, listen_thread;
	int listen_port;
	int thread_sync;
	unsigned int workers;
	uint64_t progress_delay_us, listen_delay_us;
	bool telemetry;
} nx_config;

typedef struct {
	uint64_t start_us, post_us, transfer_us, bytes, descriptors;
} nx_telemetry;

// NX_TABLE calls X with the name, less the prefix nixl_capi_, and the parameters of every function.
#define NX_TABLE(X) \
	X(create_configured_agent, (const char *, const nx_config *, nx_handle *)) \
	X(destroy_agent, (nx_handle)) \
	X(get_local_md, (nx_handle, void **, size_t *)) \
	X(load_remote_md, (nx_handle, const void *, size_t, char **)) \
	X(invalidate_remote_md, (nx_handle, const char *)) \
	X(get_available_plugins, (nx_handle, nx_handle *)) \
	X(destroy_string_list, (nx_handle)) \
	X(string_list_size, (nx_handle, size_t *)) \
	X(string_list_get, (nx_handle, size_t, const char **)) \
	X(get_plugin_params, (nx_handle, const char *, nx_handle *, nx_handle *)) \
	X(destroy_mem_list, (nx_handle)) \
	X(destroy_params, (nx_handle)) \
	X(params_add, (nx_handle, const char *, const char *)) \
	X(create_backend, (nx_handle, const char *, nx_handle, nx_handle *)) \
	X(destroy_backend, (nx_handle)) \
	X(create_opt_args, (nx_handle *)) \
	X(destroy_opt_args, (nx_handle)) \
	X(opt_args_add_backend, (nx_handle, nx_handle)) \
	X(opt_args_set_notif_msg, (nx_handle, const void *, size_t)) \
	X(opt_args_set_has_notif, (nx_handle, bool)) \
	X(register_mem, (nx_handle, nx_handle, nx_handle)) \
	X(deregister_mem, (nx_handle, nx_handle, nx_handle)) \
	X(agent_make_connection, (nx_handle, const char *, nx_handle)) \
	X(get_notifs, (nx_handle, nx_handle, nx_handle)) \
	X(create_notif_map, (nx_handle *)) \
	X(destroy_notif_map, (nx_handle)) \
	X(notif_map_size, (nx_handle, size_t *)) \
	X(notif_map_get_agent_at, (nx_handle, size_t, const char **)) \
	X(notif_map_get_notifs_size, (nx_handle, const char *, size_t *)) \
	X(notif_map_get_notif, (nx_handle, const char *, size_t, const void **, size_t *)) \
	X(gen_notif, (nx_handle, const char *, const void *, size_t, nx_handle)) \
	X(prep_xfer_dlist, (nx_handle, const char *, nx_handle, nx_handle *, nx_handle)) \
	X(release_xfer_dlist_handle, (nx_handle, nx_handle)) \
	X(make_xfer_req, (nx_handle, int, nx_handle, const int *, size_t, nx_handle, const int *, size_t, nx_handle *, nx_handle)) \
	X(create_xfer_req, (nx_handle, int, nx_handle, nx_handle, const char *, nx_handle *, nx_handle)) \
	X(post_xfer_req, (nx_handle, nx_handle, nx_handle)) \
	X(get_xfer_status, (nx_handle, nx_handle)) \
	X(release_xfer_req, (nx_handle, nx_handle)) \
	X(destroy_xfer_req, (nx_handle)) \
	X(create_xfer_dlist, (int, nx_handle *)) \
	X(destroy_xfer_dlist, (nx_handle)) \
	X(xfer_dlist_add_desc, (nx_handle, uintptr_t, size_t, uint64_t)) \
	X(create_reg_dlist, (int, nx_handle *)) \
	X(destroy_reg_dlist, (nx_handle)) \
	X(reg_dlist_add_desc, (nx_handle, uintptr_t, size_t, uint64_t, const void *, size_t)) \
	X(get_xfer_telemetry, (nx_handle, nx_handle, nx_telemetry *))

typedef struct nx_table {
	struct nx_table *next;
#define X(name, args) nx_status(*name) args;
	NX_TABLE(X)
#undef X
} nx_table;

// A region of memory or of a file. No pointers for the garbage collector to see.
typedef struct {
	uintptr_t addr;
	size_t len;
	uint64_t device;
} nx_region;

// What a transfer moves: count regions here and as many at remote.
typedef struct {
	int op, local_kind, remote_kind;
	size_t count;
	size_t message_len;
} nx_request;

// kvport_nixl_load returns the functions of the library at path, for the life of the process. On a failure
// it returns NULL, sets *reason to what dlopen or dlsym said, to be freed, and *symbol to the name of the
// symbol that is missing, if it is one.
nx_table *kvport_nixl_load(const char *path, char **reason, const char **symbol);

nx_status kvport_nixl_create_agent(nx_table *t, const char *name, nx_config *c, nx_handle *agent);
nx_status kvport_nixl_destroy_agent(nx_table *t, nx_handle agent);
nx_status kvport_nixl_plugins(nx_table *t, nx_handle agent, nx_handle *list, size_t *count);
nx_status kvport_nixl_plugin(nx_table *t, nx_handle list, size_t i, const char **name);
void kvport_nixl_free_plugins(nx_table *t, nx_handle list);
// kvport_nixl_backend starts a backend; pairs is count keys and values in turn.
nx_status kvport_nixl_backend(nx_table *t, nx_handle agent, const char *name, char **pairs, size_t count, nx_handle *backend);
nx_status kvport_nixl_destroy_backend(nx_table *t, nx_handle backend);
nx_status kvport_nixl_register(nx_table *t, nx_handle agent, nx_handle backend, int kind, const nx_region *r, size_t count);
nx_status kvport_nixl_deregister(nx_table *t, nx_handle agent, nx_handle backend, int kind, const nx_region *r, size_t count);
nx_status kvport_nixl_metadata(nx_table *t, nx_handle agent, void **data, size_t *len);
nx_status kvport_nixl_load_remote(nx_table *t, nx_handle agent, const void *data, size_t len, char **name);
nx_status kvport_nixl_drop_remote(nx_table *t, nx_handle agent, const char *name);
nx_status kvport_nixl_connect(nx_table *t, nx_handle agent, const char *name);
nx_status kvport_nixl_prepare(nx_table *t, nx_handle agent, nx_handle backend, const nx_request *q, const nx_region *local,
			      const nx_region *remote, const char *name, const void *message, nx_handle *transfer);
// kvport_nixl_list prepares regions of one end: of the agent itself with an empty name, of a peer otherwise.
nx_status kvport_nixl_list(nx_table *t, nx_handle agent, nx_handle backend, const char *name, int kind, const nx_region *r, size_t count,
			   nx_handle *list);
nx_status kvport_nixl_free_list(nx_table *t, nx_handle agent, nx_handle list);
// kvport_nixl_make makes a transfer of count regions of two lists, by their places in them.
nx_status kvport_nixl_make(nx_table *t, nx_handle agent, nx_handle backend, int op, nx_handle local, const int *here, nx_handle remote,
			   const int *there, size_t count, nx_handle *transfer);
nx_status kvport_nixl_post(nx_table *t, nx_handle agent, nx_handle transfer);
nx_status kvport_nixl_poll(nx_table *t, nx_handle agent, nx_handle transfer);
nx_status kvport_nixl_release(nx_table *t, nx_handle agent, nx_handle transfer);
nx_status kvport_nixl_telemetry(nx_table *t, nx_handle agent, nx_handle transfer, nx_telemetry *out);
nx_status kvport_nixl_notify(nx_table *t, nx_handle agent, const char *name, const void *data, size_t len);
// kvport_nixl_notifications takes what came into a new map of count senders.
nx_status kvport_nixl_notifications(nx_table *t, nx_handle agent, nx_handle *map, size_t *count);
nx_status kvport_nixl_sender(nx_table *t, nx_handle map, size_t i, const char **name, size_t *count);
nx_status kvport_nixl_message(nx_table *t, nx_handle map, const char *name, size_t i, const void **data, size_t *len);
void kvport_nixl_free_notifications(nx_table *t, nx_handle map);

#endif
