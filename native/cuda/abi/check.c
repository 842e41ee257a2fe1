// Compiles without a warning only if capi.h says what cuda_runtime_api.h says: `make native-abi-gpu`.
#include <cuda_runtime_api.h>

#include "../capi.h"

// A cast between functions whose parameters differ in size is a warning, and those are errors here. What comes
// by value is another struct there: its size is checked.
#define X(result, name, args) __attribute__((unused)) static result(*check_##name) args = (result(*) args)name;
static cudaError_t by_value(void **p, cx_ipc handle, unsigned flags) {
	cudaIpcMemHandle_t theirs;
	__builtin_memcpy(&theirs, &handle, sizeof(theirs));
	return cudaIpcOpenMemHandle(p, theirs, flags);
}
#define cudaIpcOpenMemHandle by_value
CX_TABLE(X)

_Static_assert(sizeof(cx_ipc) == sizeof(cudaIpcMemHandle_t) && _Alignof(cx_ipc) == _Alignof(cudaIpcMemHandle_t), "handle");
_Static_assert(sizeof(cudaError_t) == sizeof(int) && sizeof(enum cudaMemcpyKind) == sizeof(int) && sizeof(cudaStream_t) == sizeof(void *), "sizes");
_Static_assert(CX_NO_DRIVER == (int)cudaErrorInsufficientDriver && CX_NO_DEVICE == (int)cudaErrorNoDevice, "codes");
_Static_assert(CX_TO_DEVICE == (int)cudaMemcpyHostToDevice && CX_TO_HOST == (int)cudaMemcpyDeviceToHost, "kinds");
_Static_assert(CX_LAZY_PEER == cudaIpcMemLazyEnablePeerAccess, "flag");
