// The part of NCCL's C interface that this package uses, in its own words. abi/check.c compares it with nccl.h.
#ifndef KVPORT_NCCL_CAPI_H
#define KVPORT_NCCL_CAPI_H

#include <stddef.h>

typedef struct {
	char bytes[128];
} ncx_id; // ncclUniqueId, passed by value

enum { NCX_OK = 0, NCX_CUDA = 1, NCX_IN_PROGRESS = 7, NCX_BYTE = 1 };

#define NCX_TABLE(X) \
	X(int, ncclGetVersion, (int *)) \
	X(int, ncclGetUniqueId, (ncx_id *)) \
	X(const char *, ncclGetErrorString, (int)) \
	X(const char *, ncclGetLastError, (void *)) \
	X(int, ncclCommInitRank, (void **, int, ncx_id, int)) \
	X(int, ncclSend, (const void *, size_t, int, int, void *, void *)) \
	X(int, ncclRecv, (void *, size_t, int, int, void *, void *)) \
	X(int, ncclGroupStart, (void)) \
	X(int, ncclGroupEnd, (void)) \
	X(int, ncclCommGetAsyncError, (void *, int *)) \
	X(int, ncclCommAbort, (void *)) \
	X(int, ncclCommDestroy, (void *))

typedef struct ncx_table {
	struct ncx_table *next;
#define X(result, name, args) result(*name) args;
	NCX_TABLE(X)
#undef X
} ncx_table;

// kvport_nccl_load returns the functions of the library at path, for the life of the process. On a failure it
// returns NULL, sets *reason to what dlopen or dlsym said, to be freed, and *symbol to the name of the symbol
// that is missing, if it is one. The other functions return NCCL's code.
ncx_table *kvport_nccl_load(const char *path, char **reason, const char **symbol);
int kvport_nccl_version(ncx_table *t, int *version);
int kvport_nccl_id(ncx_table *t, ncx_id *id);
const char *kvport_nccl_text(ncx_table *t, int code);
const char *kvport_nccl_last(ncx_table *t);
// kvport_nccl_driver says whether there is a driver of a GPU.
int kvport_nccl_driver(void);
int kvport_nccl_join(ncx_table *t, const ncx_id *id, int ranks, int rank, void **comm);
int kvport_nccl_send(ncx_table *t, void *comm, const void *data, size_t n, int peer, void *stream);
int kvport_nccl_receive(ncx_table *t, void *comm, void *data, size_t n, int peer, void *stream);
int kvport_nccl_group(ncx_table *t, int start);
int kvport_nccl_state(ncx_table *t, void *comm, int *state);
int kvport_nccl_leave(ncx_table *t, void *comm, int abort);

#endif
