//go:build cgo && linux && (amd64 || arm64)

#include "capi.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static char *message_of(const char *text) { return strdup(text ? text : "unknown error"); }

// Every table: they are never freed, and a leak checker looks for them here.
static cx_table *tables;

cx_table *kvport_cuda_load(const char *path, char **reason, const char **symbol) {
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		*reason = message_of(dlerror());
		return NULL;
	}
	cx_table *t = calloc(1, sizeof(*t));
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
	CX_TABLE(X)
#undef X
	t->next = __atomic_load_n(&tables, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&tables, &t->next, t, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
	return t;
}

int kvport_cuda_devices(cx_table *t, int *count) { return t->cudaGetDeviceCount(count); }
int kvport_cuda_version(cx_table *t, int *version) { return t->cudaRuntimeGetVersion(version); }
const char *kvport_cuda_text(cx_table *t, int code) { return t->cudaGetErrorString(code); }

// A thread has a current device, and a goroutine may change threads between calls: so each call sets it.
int kvport_cuda_malloc(cx_table *t, int device, void **p, size_t n) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaMalloc(p, n);
}

int kvport_cuda_free(cx_table *t, int device, void *p) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaFree(p);
}

int kvport_cuda_copy(cx_table *t, int device, void *to, const void *from, size_t n, int kind) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaMemcpy(to, from, n, kind);
}

int kvport_cuda_export(cx_table *t, int device, void *p, cx_ipc *handle) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaIpcGetMemHandle(handle, p);
}

int kvport_cuda_import(cx_table *t, int device, const cx_ipc *handle, void **p) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaIpcOpenMemHandle(p, *handle, CX_LAZY_PEER);
}

int kvport_cuda_unimport(cx_table *t, int device, void *p) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaIpcCloseMemHandle(p);
}

int kvport_cuda_stream(cx_table *t, int device, void **stream) {
	int rc = t->cudaSetDevice(device);
	return rc ? rc : t->cudaStreamCreate(stream);
}

int kvport_cuda_free_stream(cx_table *t, void *stream) { return t->cudaStreamDestroy(stream); }
int kvport_cuda_wait(cx_table *t, void *stream) { return t->cudaStreamSynchronize(stream); }
