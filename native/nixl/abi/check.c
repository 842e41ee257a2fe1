// Compiles without a warning only if capi.h says what the vendor's header says: `make native-abi`.
#include "wrapper.h"

#include "../capi.h"

// A cast between functions whose parameters differ in size is a warning, and those are errors here.
#define X(name, args) __attribute__((unused)) static nx_status(*check_##name) args = (nx_status(*) args)nixl_capi_##name;
NX_TABLE(X)
#undef X

#define SAME(ours, field, theirs, their_field) \
	_Static_assert(offsetof(ours, field) == offsetof(theirs, their_field) && sizeof((ours){0}.field) == sizeof((theirs){0}.their_field), #field)

_Static_assert(sizeof(nx_status) == sizeof(nixl_capi_status_t), "status");
_Static_assert(sizeof(nx_config) == sizeof(nixl_capi_agent_config_t), "config");
SAME(nx_config, progress_thread, nixl_capi_agent_config_t, enable_prog_thread);
SAME(nx_config, listen_thread, nixl_capi_agent_config_t, enable_listen_thread);
SAME(nx_config, listen_port, nixl_capi_agent_config_t, listen_port);
SAME(nx_config, thread_sync, nixl_capi_agent_config_t, thread_sync);
SAME(nx_config, workers, nixl_capi_agent_config_t, num_workers);
SAME(nx_config, progress_delay_us, nixl_capi_agent_config_t, pthr_delay_us);
SAME(nx_config, listen_delay_us, nixl_capi_agent_config_t, lthr_delay_us);
SAME(nx_config, telemetry, nixl_capi_agent_config_t, capture_telemetry);

typedef struct nixl_capi_xfer_telemetry_s vendor_telemetry;
_Static_assert(sizeof(nx_telemetry) == sizeof(vendor_telemetry), "telemetry");
SAME(nx_telemetry, start_us, vendor_telemetry, start_time_us);
SAME(nx_telemetry, post_us, vendor_telemetry, post_duration_us);
SAME(nx_telemetry, transfer_us, vendor_telemetry, xfer_duration_us);
SAME(nx_telemetry, bytes, vendor_telemetry, total_bytes);
SAME(nx_telemetry, descriptors, vendor_telemetry, desc_count);

_Static_assert(NIXL_CAPI_SUCCESS == 0 && NIXL_CAPI_IN_PROG == (int)NX_IN_PROGRESS && NIXL_CAPI_ERROR_INVALID_PARAM == -1 && NIXL_CAPI_ERROR_BACKEND == -2 &&
		       NIXL_CAPI_ERROR_INVALID_STATE == -3 && NIXL_CAPI_ERROR_EXCEPTION == -4 && NIXL_CAPI_ERROR_NO_TELEMETRY == -5 &&
		       NIXL_CAPI_ERROR_NOT_FOUND == -6,
	       "values of status");
_Static_assert(NIXL_CAPI_MEM_DRAM == 0 && NIXL_CAPI_MEM_VRAM == 1 && NIXL_CAPI_MEM_BLOCK == 2 && NIXL_CAPI_MEM_OBJECT == 3 && NIXL_CAPI_MEM_FILE == 4,
	       "values of kinds");
_Static_assert(NIXL_CAPI_XFER_OP_READ == 0 && NIXL_CAPI_XFER_OP_WRITE == 1 && NIXL_CAPI_THREAD_SYNC_STRICT == (int)NX_STRICT, "values of operations");
