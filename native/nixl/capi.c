//go:build cgo

#include "capi.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static char *message_of(const char *text) { return strdup(text ? text : "unknown error"); }

// Every table: they are never freed, and a leak checker looks for them here.
static nx_table *tables;

nx_table *kvport_nixl_load(const char *path, char **reason, const char **symbol) {
	// Local, so that neither NIXL nor its UCX meets another copy of a library in this process. It is never
	// closed: UCX does not survive that.
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		*reason = message_of(dlerror());
		return NULL;
	}
	nx_table *t = calloc(1, sizeof(*t));
	if (!t) {
		*reason = message_of("out of memory");
		return NULL;
	}
#define X(name, args) \
	if (!(*(void **)&t->name = dlsym(lib, "nixl_capi_" #name))) { \
		*symbol = "nixl_capi_" #name; \
		*reason = message_of(dlerror()); \
		free(t); \
		return NULL; \
	}
	NX_TABLE(X)
#undef X
	t->next = __atomic_load_n(&tables, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&tables, &t->next, t, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
	return t;
}

nx_status kvport_nixl_create_agent(nx_table *t, const char *name, nx_config *c, nx_handle *agent) {
	return t->create_configured_agent(name, c, agent);
}

nx_status kvport_nixl_destroy_agent(nx_table *t, nx_handle agent) { return t->destroy_agent(agent); }

nx_status kvport_nixl_plugins(nx_table *t, nx_handle agent, nx_handle *list, size_t *count) {
	nx_status s = t->get_available_plugins(agent, list);
	return s ? s : t->string_list_size(*list, count);
}

nx_status kvport_nixl_plugin(nx_table *t, nx_handle list, size_t i, const char **name) { return t->string_list_get(list, i, name); }

void kvport_nixl_free_plugins(nx_table *t, nx_handle list) {
	if (list)
		t->destroy_string_list(list);
}

nx_status kvport_nixl_backend(nx_table *t, nx_handle agent, const char *name, char **pairs, size_t count, nx_handle *backend) {
	nx_handle kinds = NULL, params = NULL;
	nx_status s = t->get_plugin_params(agent, name, &kinds, &params);
	for (size_t i = 0; !s && i + 1 < count; i += 2)
		s = t->params_add(params, pairs[i], pairs[i + 1]);
	if (!s)
		s = t->create_backend(agent, name, params, backend);
	if (params)
		t->destroy_params(params);
	if (kinds)
		t->destroy_mem_list(kinds);
	return s;
}

nx_status kvport_nixl_destroy_backend(nx_table *t, nx_handle backend) { return t->destroy_backend(backend); }

typedef nx_status (*registrar)(nx_handle, nx_handle, nx_handle);

static nx_status with_regions(nx_table *t, registrar do_it, nx_handle agent, nx_handle backend, int kind, const nx_region *r, size_t count) {
	nx_handle list = NULL, args = NULL;
	nx_status s = t->create_reg_dlist(kind, &list);
	for (size_t i = 0; !s && i < count; i++)
		s = t->reg_dlist_add_desc(list, r[i].addr, r[i].len, r[i].device, "", 0);
	if (!s)
		s = t->create_opt_args(&args);
	if (!s && backend)
		s = t->opt_args_add_backend(args, backend);
	if (!s)
		s = do_it(agent, list, args);
	if (args)
		t->destroy_opt_args(args);
	if (list)
		t->destroy_reg_dlist(list);
	return s;
}

nx_status kvport_nixl_register(nx_table *t, nx_handle agent, nx_handle backend, int kind, const nx_region *r, size_t count) {
	return with_regions(t, t->register_mem, agent, backend, kind, r, count);
}

nx_status kvport_nixl_deregister(nx_table *t, nx_handle agent, nx_handle backend, int kind, const nx_region *r, size_t count) {
	return with_regions(t, t->deregister_mem, agent, backend, kind, r, count);
}

nx_status kvport_nixl_metadata(nx_table *t, nx_handle agent, void **data, size_t *len) { return t->get_local_md(agent, data, len); }

nx_status kvport_nixl_load_remote(nx_table *t, nx_handle agent, const void *data, size_t len, char **name) {
	return t->load_remote_md(agent, data, len, name);
}

nx_status kvport_nixl_drop_remote(nx_table *t, nx_handle agent, const char *name) { return t->invalidate_remote_md(agent, name); }

nx_status kvport_nixl_connect(nx_table *t, nx_handle agent, const char *name) {
	nx_handle args = NULL;
	nx_status s = t->create_opt_args(&args);
	if (!s)
		s = t->agent_make_connection(agent, name, args);
	if (args)
		t->destroy_opt_args(args);
	return s;
}

static nx_status list_of(nx_table *t, int kind, const nx_region *r, size_t count, nx_handle *list) {
	nx_status s = t->create_xfer_dlist(kind, list);
	for (size_t i = 0; !s && i < count; i++)
		s = t->xfer_dlist_add_desc(*list, r[i].addr, r[i].len, r[i].device);
	return s;
}

static nx_status args_of(nx_table *t, nx_handle backend, const void *message, size_t len, nx_handle *args) {
	nx_status s = t->create_opt_args(args);
	if (!s && backend)
		s = t->opt_args_add_backend(*args, backend);
	if (!s && len)
		s = t->opt_args_set_notif_msg(*args, message, len);
	if (!s && len)
		s = t->opt_args_set_has_notif(*args, true);
	return s;
}

nx_status kvport_nixl_prepare(nx_table *t, nx_handle agent, nx_handle backend, const nx_request *q, const nx_region *local,
			      const nx_region *remote, const char *name, const void *message, nx_handle *transfer) {
	nx_handle here = NULL, there = NULL, args = NULL;
	nx_status s = list_of(t, q->local_kind, local, q->count, &here);
	if (!s)
		s = list_of(t, q->remote_kind, remote, q->count, &there);
	if (!s)
		s = args_of(t, backend, message, q->message_len, &args);
	if (!s)
		s = t->create_xfer_req(agent, q->op, here, there, name, transfer, args);
	if (args)
		t->destroy_opt_args(args);
	if (there)
		t->destroy_xfer_dlist(there);
	if (here)
		t->destroy_xfer_dlist(here);
	return s;
}

nx_status kvport_nixl_list(nx_table *t, nx_handle agent, nx_handle backend, const char *name, int kind, const nx_region *r, size_t count,
			   nx_handle *list) {
	nx_handle regions = NULL, args = NULL;
	nx_status s = list_of(t, kind, r, count, &regions);
	if (!s)
		s = args_of(t, backend, NULL, 0, &args);
	if (!s)
		s = t->prep_xfer_dlist(agent, name, regions, list, args);
	if (args)
		t->destroy_opt_args(args);
	if (regions)
		t->destroy_xfer_dlist(regions);
	return s;
}

nx_status kvport_nixl_free_list(nx_table *t, nx_handle agent, nx_handle list) { return t->release_xfer_dlist_handle(agent, list); }

nx_status kvport_nixl_make(nx_table *t, nx_handle agent, nx_handle backend, int op, nx_handle local, const int *here, nx_handle remote,
			   const int *there, size_t count, nx_handle *transfer) {
	nx_handle args = NULL;
	nx_status s = args_of(t, backend, NULL, 0, &args);
	if (!s)
		s = t->make_xfer_req(agent, op, local, here, count, remote, there, count, transfer, args);
	if (args)
		t->destroy_opt_args(args);
	return s;
}

nx_status kvport_nixl_post(nx_table *t, nx_handle agent, nx_handle transfer) { return t->post_xfer_req(agent, transfer, NULL); }

nx_status kvport_nixl_poll(nx_table *t, nx_handle agent, nx_handle transfer) { return t->get_xfer_status(agent, transfer); }

nx_status kvport_nixl_release(nx_table *t, nx_handle agent, nx_handle transfer) {
	nx_status s = t->release_xfer_req(agent, transfer);
	nx_status freed = t->destroy_xfer_req(transfer);
	return s ? s : freed;
}

nx_status kvport_nixl_telemetry(nx_table *t, nx_handle agent, nx_handle transfer, nx_telemetry *out) {
	return t->get_xfer_telemetry(agent, transfer, out);
}

nx_status kvport_nixl_notify(nx_table *t, nx_handle agent, const char *name, const void *data, size_t len) {
	nx_handle args = NULL;
	nx_status s = t->create_opt_args(&args);
	if (!s)
		s = t->gen_notif(agent, name, data, len, args);
	if (args)
		t->destroy_opt_args(args);
	return s;
}

nx_status kvport_nixl_notifications(nx_table *t, nx_handle agent, nx_handle *map, size_t *count) {
	nx_status s = t->create_notif_map(map);
	if (!s)
		s = t->get_notifs(agent, *map, NULL);
	return s ? s : t->notif_map_size(*map, count);
}

nx_status kvport_nixl_sender(nx_table *t, nx_handle map, size_t i, const char **name, size_t *count) {
	nx_status s = t->notif_map_get_agent_at(map, i, name);
	return s ? s : t->notif_map_get_notifs_size(map, *name, count);
}

nx_status kvport_nixl_message(nx_table *t, nx_handle map, const char *name, size_t i, const void **data, size_t *len) {
	return t->notif_map_get_notif(map, name, i, data, len);
}

void kvport_nixl_free_notifications(nx_table *t, nx_handle map) {
	if (map)
		t->destroy_notif_map(map);
}
