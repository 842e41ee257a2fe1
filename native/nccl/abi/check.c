// Compiles without a warning only if capi.h says what nccl.h says: `make native-abi-gpu`.
#define __CUDA_FP16_H__ // nccl.h includes these for types of which it uses only the names
#define __CUDA_BF16_H__
#include <nccl.h>

#include "../capi.h"

// A cast between functions whose parameters differ in size is a warning, and those are errors here. What comes
// by value is another struct there: its size is checked.
#define X(result, name, args) __attribute__((unused)) static result(*check_##name) args = (result(*) args)name;
static ncclResult_t by_value(void **comm, int ranks, ncx_id id, int rank) {
	ncclUniqueId theirs;
	__builtin_memcpy(&theirs, &id, sizeof(theirs));
	return ncclCommInitRank((ncclComm_t *)comm, ranks, theirs, rank);
}
#define ncclCommInitRank by_value
NCX_TABLE(X)

_Static_assert(sizeof(ncx_id) == sizeof(ncclUniqueId) && _Alignof(ncx_id) == _Alignof(ncclUniqueId), "id");
_Static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int), "enums");
_Static_assert(NCX_OK == (int)ncclSuccess && NCX_CUDA == (int)ncclUnhandledCudaError && NCX_IN_PROGRESS == (int)ncclInProgress, "codes");
_Static_assert(NCX_BYTE == (int)ncclUint8, "type");
