//go:build cgo && linux && (amd64 || arm64)

#include "capi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static char *message_of(const char *text) { return strdup(text ? text : "unknown error"); }

// Every table: they are never freed, and a leak checker looks for them here.
static ux_table *tables;

ux_table *kvport_ucx_load(const char *path, char **reason, const char **symbol) {
	// Local, so that it does not meet another UCX, as that of NIXL. It is never closed: UCX does not survive it.
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		*reason = message_of(dlerror());
		return NULL;
	}
	ux_table *t = calloc(1, sizeof(*t));
	if (!t) {
		*reason = message_of("out of memory");
		return NULL;
	}
#define X(result, name, args) \
	if (!(*(void **)&t->name = dlsym(lib, #name))) { \
		*symbol = #name; \
		*reason = message_of(dlerror()); \
		free(t); \
		return NULL; \
	}
	UX_TABLE(X)
#undef X
	t->next = __atomic_load_n(&tables, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&tables, &t->next, t, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
	return t;
}

const char *kvport_ucx_version(ux_table *t) { return t->ucp_get_version_string(); }

const char *kvport_ucx_text(ux_table *t, int status) { return t->ucs_status_string((ux_status)status); }

static int configure(ux_table *t, ux_handle config, const char *transports, const char *devices) {
	int s = *transports ? t->ucp_config_modify(config, "TLS", transports) : UX_OK;
	if (!s && *devices)
		s = t->ucp_config_modify(config, "NET_DEVICES", devices);
	// Without these, endpoints that are to report the death of their peer need TCP, or find out late.
	if (!s && strstr(transports, "posix"))
		s = t->ucp_config_modify(config, "POSIX_ERROR_HANDLING", "y");
	if (!s && strstr(transports, "posix"))
		s = t->ucp_config_modify(config, "KEEPALIVE_INTERVAL", "1s");
	return s;
}

int kvport_ucx_worker(ux_table *t, const char *transports, const char *devices, ux_handle *context, ux_handle *worker) {
	ux_handle config;
	int s = t->ucp_config_read(NULL, NULL, &config);
	if (s)
		return s;
	ux_params params = {.mask = UX_PARAMS_FEATURES, .features = UX_FEATURE_TAG | UX_FEATURE_RMA | UX_FEATURE_WAKEUP};
	s = configure(t, config, transports, devices);
	if (!s)
		s = t->ucp_init_version(UX_MAJOR, UX_MINOR, &params, config, context);
	t->ucp_config_release(config);
	if (s)
		return s;
	ux_worker_params how = {.mask = UX_WORKER_THREADS, .threads = UX_SERIALIZED};
	s = t->ucp_worker_create(*context, &how, worker);
	if (s)
		t->ucp_cleanup(*context);
	return s;
}

void kvport_ucx_free_worker(ux_table *t, ux_handle context, ux_handle worker) {
	t->ucp_worker_destroy(worker);
	t->ucp_cleanup(context);
}

int kvport_ucx_address(ux_table *t, ux_handle worker, void **address, size_t *len) {
	return t->ucp_worker_get_address(worker, address, len);
}

void kvport_ucx_free_address(ux_table *t, ux_handle worker, void *address) { t->ucp_worker_release_address(worker, address); }

int kvport_ucx_fd(ux_table *t, ux_handle worker, int *fd) { return t->ucp_worker_get_efd(worker, fd); }

int kvport_ucx_arm(ux_table *t, ux_handle worker) { return t->ucp_worker_arm(worker); }

int kvport_ucx_progress(ux_table *t, ux_handle worker) { return t->ucp_worker_progress(worker) != 0; }

int kvport_ucx_map(ux_table *t, ux_handle context, void *address, size_t len, ux_handle *memory) {
	ux_map_params p = {.mask = UX_MAP_ADDRESS | UX_MAP_LENGTH, .address = address, .length = len};
	return t->ucp_mem_map(context, &p, memory);
}

int kvport_ucx_unmap(ux_table *t, ux_handle context, ux_handle memory) { return t->ucp_mem_unmap(context, memory); }

int kvport_ucx_pack(ux_table *t, ux_handle context, ux_handle memory, void **key, size_t *len) {
	return t->ucp_rkey_pack(context, memory, key, len);
}

void kvport_ucx_free_packed(ux_table *t, void *key) { t->ucp_rkey_buffer_release(key); }

int kvport_ucx_unpack(ux_table *t, ux_handle endpoint, const void *packed, ux_handle *key) {
	return t->ucp_ep_rkey_unpack(endpoint, packed, key);
}

void kvport_ucx_free_key(ux_table *t, ux_handle key) { t->ucp_rkey_destroy(key); }

int kvport_ucx_connect(ux_table *t, ux_handle worker, const void *address, int peer_errors, ux_handle *endpoint) {
	ux_ep_params p = {
		.mask = UX_EP_ADDRESS | UX_EP_ERRORS,
		.address = address,
		.errors = peer_errors ? UX_ERRORS_PEER : UX_ERRORS_NONE,
	};
	return t->ucp_ep_create(worker, &p, endpoint);
}

// started sorts out what the starting functions return.
static int started(ux_request r, ux_request *request) {
	if (!r)
		return UX_OK;
	if ((uintptr_t)r >= (uintptr_t)(intptr_t)UX_LAST)
		return (int)(intptr_t)r;
	*request = r;
	return UX_IN_PROGRESS;
}

int kvport_ucx_close(ux_table *t, ux_handle endpoint, uint32_t flags, ux_request *request) {
	ux_op op = {.mask = UX_OP_FLAGS, .flags = flags};
	return started(t->ucp_ep_close_nbx(endpoint, &op), request);
}

int kvport_ucx_flush(ux_table *t, ux_handle endpoint, ux_request *request) {
	ux_op op = {0};
	return started(t->ucp_ep_flush_nbx(endpoint, &op), request);
}

int kvport_ucx_move(ux_table *t, ux_handle endpoint, const ux_move *m, ux_request *request) {
	ux_op op = {.mask = m->memory ? UX_OP_MEMORY : 0, .memory = m->memory};
	if (m->get)
		return started(t->ucp_get_nbx(endpoint, m->local, m->len, m->remote, m->key, &op), request);
	return started(t->ucp_put_nbx(endpoint, m->local, m->len, m->remote, m->key, &op), request);
}

int kvport_ucx_send(ux_table *t, ux_handle endpoint, const void *data, size_t len, uint64_t tag, ux_request *request) {
	ux_op op = {0};
	return started(t->ucp_tag_send_nbx(endpoint, data, len, tag, &op), request);
}

int kvport_ucx_receive(ux_table *t, ux_handle worker, void *data, size_t len, uint64_t tag, uint64_t mask, ux_request *request) {
	ux_op op = {.mask = UX_OP_NOT_AT_ONCE}; // so that there is a request to ask how much came
	return started(t->ucp_tag_recv_nbx(worker, data, len, tag, mask, &op), request);
}

int kvport_ucx_poll(ux_table *t, ux_handle worker, ux_request request, ux_received *received) {
	int s = t->ucp_request_check_status(request);
	if (s == UX_IN_PROGRESS) {
		t->ucp_worker_progress(worker);
		s = t->ucp_request_check_status(request);
	}
	if (s == UX_IN_PROGRESS)
		return s;
	if (received && !s)
		s = t->ucp_tag_recv_request_test(request, received);
	t->ucp_request_free(request);
	return s;
}

void kvport_ucx_cancel(ux_table *t, ux_handle worker, ux_request request) { t->ucp_request_cancel(worker, request); }
