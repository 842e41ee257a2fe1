// Compiles without a warning only if capi.h says what UCX's own headers say: `make native-abi`.
#include <ucp/api/ucp.h>

#include "../capi.h"

// A cast between functions whose parameters differ in size is a warning, and those are errors here.
#define X(result, name, args) __attribute__((unused)) static result(*check_##name) args = (result(*) args)name;
UX_TABLE(X)
#undef X

#define SAME(ours, field, theirs, their_field) \
	_Static_assert(offsetof(ours, field) == offsetof(theirs, their_field) && sizeof((ours){0}.field) == sizeof((theirs){0}.their_field), #ours "." #field)
#define AS_LONG(ours, theirs) _Static_assert(sizeof(ours) >= sizeof(theirs), #ours)

_Static_assert(sizeof(ux_status) == sizeof(ucs_status_t), "status");
AS_LONG(ux_params, ucp_params_t);
SAME(ux_params, mask, ucp_params_t, field_mask);
SAME(ux_params, features, ucp_params_t, features);
AS_LONG(ux_worker_params, ucp_worker_params_t);
SAME(ux_worker_params, mask, ucp_worker_params_t, field_mask);
SAME(ux_worker_params, threads, ucp_worker_params_t, thread_mode);
AS_LONG(ux_map_params, ucp_mem_map_params_t);
SAME(ux_map_params, mask, ucp_mem_map_params_t, field_mask);
SAME(ux_map_params, address, ucp_mem_map_params_t, address);
SAME(ux_map_params, length, ucp_mem_map_params_t, length);
AS_LONG(ux_ep_params, ucp_ep_params_t);
SAME(ux_ep_params, mask, ucp_ep_params_t, field_mask);
SAME(ux_ep_params, address, ucp_ep_params_t, address);
SAME(ux_ep_params, errors, ucp_ep_params_t, err_mode);
AS_LONG(ux_op, ucp_request_param_t);
SAME(ux_op, mask, ucp_request_param_t, op_attr_mask);
SAME(ux_op, flags, ucp_request_param_t, flags);
SAME(ux_op, memory, ucp_request_param_t, memh);
_Static_assert(sizeof(ux_received) == sizeof(ucp_tag_recv_info_t), "received");
SAME(ux_received, tag, ucp_tag_recv_info_t, sender_tag);
SAME(ux_received, length, ucp_tag_recv_info_t, length);

#define VALUE(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #ours)
VALUE(UX_OK, UCS_OK);
VALUE(UX_IN_PROGRESS, UCS_INPROGRESS);
VALUE(UX_BUSY, UCS_ERR_BUSY);
VALUE(UX_LAST, UCS_ERR_LAST);
VALUE(UX_MAJOR, UCP_API_MAJOR);
VALUE(UX_MINOR, UCP_API_MINOR);
VALUE(UX_PARAMS_FEATURES, UCP_PARAM_FIELD_FEATURES);
VALUE(UX_FEATURE_TAG, UCP_FEATURE_TAG);
VALUE(UX_FEATURE_RMA, UCP_FEATURE_RMA);
VALUE(UX_FEATURE_WAKEUP, UCP_FEATURE_WAKEUP);
VALUE(UX_WORKER_THREADS, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
VALUE(UX_SERIALIZED, UCS_THREAD_MODE_SERIALIZED);
VALUE(UX_MAP_ADDRESS, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
VALUE(UX_MAP_LENGTH, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
VALUE(UX_EP_ADDRESS, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
VALUE(UX_EP_ERRORS, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
VALUE(UX_ERRORS_NONE, UCP_ERR_HANDLING_MODE_NONE);
VALUE(UX_ERRORS_PEER, UCP_ERR_HANDLING_MODE_PEER);
VALUE(UX_OP_FLAGS, UCP_OP_ATTR_FIELD_FLAGS);
VALUE(UX_OP_MEMORY, UCP_OP_ATTR_FIELD_MEMH);
VALUE(UX_OP_NOT_AT_ONCE, UCP_OP_ATTR_FLAG_NO_IMM_CMPL);
VALUE(UX_CLOSE_FORCE, UCP_EP_CLOSE_FLAG_FORCE);
