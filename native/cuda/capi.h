// The part of the CUDA runtime's C interface that this package uses, in its own words. abi/check.c compares it
// with cuda_runtime_api.h.
#ifndef KVPORT_CUDA_CAPI_H
#define KVPORT_CUDA_CAPI_H

#include <stddef.h>

typedef struct {
	char bytes[64];
} cx_ipc; // cudaIpcMemHandle_t, passed by value

enum { CX_NO_DRIVER = 35, CX_NO_DEVICE = 100, CX_TO_DEVICE = 1, CX_TO_HOST = 2, CX_LAZY_PEER = 1 };

#define CX_TABLE(X) \
	X(int, cudaGetDeviceCount, (int *)) \
	X(int, cudaRuntimeGetVersion, (int *)) \
	X(const char *, cudaGetErrorString, (int)) \
	X(int, cudaSetDevice, (int)) \
	X(int, cudaMalloc, (void **, size_t)) \
	X(int, cudaFree, (void *)) \
	X(int, cudaMemcpy, (void *, const void *, size_t, int)) \
	X(int, cudaIpcGetMemHandle, (cx_ipc *, void *)) \
	X(int, cudaIpcOpenMemHandle, (void **, cx_ipc, unsigned)) \
	X(int, cudaIpcCloseMemHandle, (void *)) \
	X(int, cudaStreamCreate, (void **)) \
	X(int, cudaStreamDestroy, (void *)) \
	X(int, cudaStreamSynchronize, (void *))

typedef struct cx_table {
	struct cx_table *next;
#define X(result, name, args) result(*name) args;
	CX_TABLE(X)
#undef X
} cx_table;

// kvport_cuda_load returns the functions of the library at path, for the life of the process. On a failure it
// returns NULL, sets *reason to what dlopen or dlsym said, to be freed, and *symbol to the name of the symbol
// that is missing, if it is one. The other functions return CUDA's code.
cx_table *kvport_cuda_load(const char *path, char **reason, const char **symbol);
int kvport_cuda_devices(cx_table *t, int *count);
int kvport_cuda_version(cx_table *t, int *version);
const char *kvport_cuda_text(cx_table *t, int code);
int kvport_cuda_malloc(cx_table *t, int device, void **p, size_t n);
int kvport_cuda_free(cx_table *t, int device, void *p);
int kvport_cuda_copy(cx_table *t, int device, void *to, const void *from, size_t n, int kind);
int kvport_cuda_export(cx_table *t, int device, void *p, cx_ipc *handle);
int kvport_cuda_import(cx_table *t, int device, const cx_ipc *handle, void **p);
int kvport_cuda_unimport(cx_table *t, int device, void *p);
int kvport_cuda_stream(cx_table *t, int device, void **stream);
int kvport_cuda_free_stream(cx_table *t, void *stream);
int kvport_cuda_wait(cx_table *t, void *stream);

#endif
