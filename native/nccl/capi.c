//go:build cgo && linux && (amd64 || arm64)

#include "capi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static char *message_of(const char *text) { return strdup(text ? text : "unknown error"); }

// Every table: they are never freed, and a leak checker looks for them here.
static ncx_table *tables;

ncx_table *kvport_nccl_load(const char *path, char **reason, const char **symbol) {
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		*reason = message_of(dlerror());
		return NULL;
	}
	ncx_table *t = calloc(1, sizeof(*t));
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
	NCX_TABLE(X)
#undef X
	t->next = __atomic_load_n(&tables, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&tables, &t->next, t, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
	return t;
}

int kvport_nccl_version(ncx_table *t, int *version) { return t->ncclGetVersion(version); }
int kvport_nccl_id(ncx_table *t, ncx_id *id) { return t->ncclGetUniqueId(id); }
const char *kvport_nccl_text(ncx_table *t, int code) { return t->ncclGetErrorString(code); }
const char *kvport_nccl_last(ncx_table *t) { return t->ncclGetLastError(NULL); }

int kvport_nccl_driver(void) {
	void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	return driver != NULL; // it stays: NCCL is going to load it as well
}

int kvport_nccl_join(ncx_table *t, const ncx_id *id, int ranks, int rank, void **comm) {
	return t->ncclCommInitRank(comm, ranks, *id, rank);
}

int kvport_nccl_send(ncx_table *t, void *comm, const void *data, size_t n, int peer, void *stream) {
	return t->ncclSend(data, n, NCX_BYTE, peer, comm, stream);
}

int kvport_nccl_receive(ncx_table *t, void *comm, void *data, size_t n, int peer, void *stream) {
	return t->ncclRecv(data, n, NCX_BYTE, peer, comm, stream);
}

int kvport_nccl_group(ncx_table *t, int start) { return start ? t->ncclGroupStart() : t->ncclGroupEnd(); }

int kvport_nccl_state(ncx_table *t, void *comm, int *state) { return t->ncclCommGetAsyncError(comm, state); }

int kvport_nccl_leave(ncx_table *t, void *comm, int abort) { return abort ? t->ncclCommAbort(comm) : t->ncclCommDestroy(comm); }
