package lmcache

import (
	"encoding/json"
	"reflect"
	"strings"
)

// Unused are the names of LMCache 0.5.6 (lmcache/v1/config.py, with its deprecated ones) and of the earlier versions whose
// examples are still published, that have no effect here. They are accepted with any value, so that a deployment of it can be taken over, and named in the log when they are set.
type Unused struct {
	LocalCPUUseHugepages                      json.RawMessage `json:"lmcache.local_cpu_use_hugepages,omitempty" jsonschema:"description=No effect."`
	ReserveLocalCPUSize                       json.RawMessage `json:"lmcache.reserve_local_cpu_size,omitempty" jsonschema:"description=No effect."`
	LocalDiskPathSharding                     json.RawMessage `json:"lmcache.local_disk_path_sharding,omitempty" jsonschema:"description=No effect."`
	UseLayerwise                              json.RawMessage `json:"lmcache.use_layerwise,omitempty" jsonschema:"description=No effect."`
	SaveDecodeCache                           json.RawMessage `json:"lmcache.save_decode_cache,omitempty" jsonschema:"description=No effect."`
	PreCachingHashAlgorithm                   json.RawMessage `json:"lmcache.pre_caching_hash_algorithm,omitempty" jsonschema:"description=No effect."`
	EnableBlending                            json.RawMessage `json:"lmcache.enable_blending,omitempty" jsonschema:"description=No effect."`
	BlendRecomputeRatios                      json.RawMessage `json:"lmcache.blend_recompute_ratios,omitempty" jsonschema:"description=No effect."`
	BlendThresholds                           json.RawMessage `json:"lmcache.blend_thresholds,omitempty" jsonschema:"description=No effect."`
	BlendCheckLayers                          json.RawMessage `json:"lmcache.blend_check_layers,omitempty" jsonschema:"description=No effect."`
	BlendMinTokens                            json.RawMessage `json:"lmcache.blend_min_tokens,omitempty" jsonschema:"description=No effect."`
	BlendSpecialStr                           json.RawMessage `json:"lmcache.blend_special_str,omitempty" jsonschema:"description=No effect."`
	RetrieveLocations                         json.RawMessage `json:"lmcache.retrieve_locations,omitempty" jsonschema:"description=No effect."`
	StoreLocation                             json.RawMessage `json:"lmcache.store_location,omitempty" jsonschema:"description=No effect."`
	EnableP2p                                 json.RawMessage `json:"lmcache.enable_p2p,omitempty" jsonschema:"description=No effect."`
	P2pHost                                   json.RawMessage `json:"lmcache.p2p_host,omitempty" jsonschema:"description=No effect."`
	P2pInitPorts                              json.RawMessage `json:"lmcache.p2p_init_ports,omitempty" jsonschema:"description=No effect."`
	P2pLookupPorts                            json.RawMessage `json:"lmcache.p2p_lookup_ports,omitempty" jsonschema:"description=No effect."`
	MpHost                                    json.RawMessage `json:"lmcache.mp_host,omitempty" jsonschema:"description=No effect."`
	MpPort                                    json.RawMessage `json:"lmcache.mp_port,omitempty" jsonschema:"description=No effect."`
	EnableController                          json.RawMessage `json:"lmcache.enable_controller,omitempty" jsonschema:"description=No effect."`
	LmcacheInstanceID                         json.RawMessage `json:"lmcache.lmcache_instance_id,omitempty" jsonschema:"description=No effect."`
	ControllerPullURL                         json.RawMessage `json:"lmcache.controller_pull_url,omitempty" jsonschema:"description=No effect."`
	ControllerReplyURL                        json.RawMessage `json:"lmcache.controller_reply_url,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerPorts                        json.RawMessage `json:"lmcache.lmcache_worker_ports,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerIDs                          json.RawMessage `json:"lmcache.lmcache_worker_ids,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerHeartbeatDelayTime           json.RawMessage `json:"lmcache.lmcache_worker_heartbeat_delay_time,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerHeartbeatTime                json.RawMessage `json:"lmcache.lmcache_worker_heartbeat_time,omitempty" jsonschema:"description=No effect."`
	EnablePd                                  json.RawMessage `json:"lmcache.enable_pd,omitempty" jsonschema:"description=No effect."`
	PdRole                                    json.RawMessage `json:"lmcache.pd_role,omitempty" jsonschema:"description=No effect."`
	PdBufferSize                              json.RawMessage `json:"lmcache.pd_buffer_size,omitempty" jsonschema:"description=No effect."`
	PdBufferDevice                            json.RawMessage `json:"lmcache.pd_buffer_device,omitempty" jsonschema:"description=No effect."`
	PdPeerHost                                json.RawMessage `json:"lmcache.pd_peer_host,omitempty" jsonschema:"description=No effect."`
	PdPeerInitPort                            json.RawMessage `json:"lmcache.pd_peer_init_port,omitempty" jsonschema:"description=No effect."`
	PdPeerAllocPort                           json.RawMessage `json:"lmcache.pd_peer_alloc_port,omitempty" jsonschema:"description=No effect."`
	PdPeerQueryPort                           json.RawMessage `json:"lmcache.pd_peer_query_port,omitempty" jsonschema:"description=No effect."`
	PdProxyHost                               json.RawMessage `json:"lmcache.pd_proxy_host,omitempty" jsonschema:"description=No effect."`
	PdProxyPort                               json.RawMessage `json:"lmcache.pd_proxy_port,omitempty" jsonschema:"description=No effect."`
	PdAllocationTimeoutSec                    json.RawMessage `json:"lmcache.pd_allocation_timeout_sec,omitempty" jsonschema:"description=No effect."`
	PdShutdownTimeoutSec                      json.RawMessage `json:"lmcache.pd_shutdown_timeout_sec,omitempty" jsonschema:"description=No effect."`
	PdConditionPollIntervalSec                json.RawMessage `json:"lmcache.pd_condition_poll_interval_sec,omitempty" jsonschema:"description=No effect."`
	PdMaxPrefillLen                           json.RawMessage `json:"lmcache.pd_max_prefill_len,omitempty" jsonschema:"description=No effect."`
	PdBackendMode                             json.RawMessage `json:"lmcache.pd_backend_mode,omitempty" jsonschema:"description=No effect."`
	PdSkipProxyNotification                   json.RawMessage `json:"lmcache.pd_skip_proxy_notification,omitempty" jsonschema:"description=No effect."`
	PdBidirectional                           json.RawMessage `json:"lmcache.pd_bidirectional,omitempty" jsonschema:"description=No effect."`
	TransferChannel                           json.RawMessage `json:"lmcache.transfer_channel,omitempty" jsonschema:"description=No effect."`
	NixlBackends                              json.RawMessage `json:"lmcache.nixl_backends,omitempty" jsonschema:"description=No effect."`
	NixlBufferSize                            json.RawMessage `json:"lmcache.nixl_buffer_size,omitempty" jsonschema:"description=No effect."`
	NixlBufferDevice                          json.RawMessage `json:"lmcache.nixl_buffer_device,omitempty" jsonschema:"description=No effect."`
	GdsPath                                   json.RawMessage `json:"lmcache.gds_path,omitempty" jsonschema:"description=No effect."`
	GdsPathSharding                           json.RawMessage `json:"lmcache.gds_path_sharding,omitempty" jsonschema:"description=No effect."`
	GdsBufferSize                             json.RawMessage `json:"lmcache.gds_buffer_size,omitempty" jsonschema:"description=No effect."`
	MaruPath                                  json.RawMessage `json:"lmcache.maru_path,omitempty" jsonschema:"description=No effect."`
	MaruPoolSize                              json.RawMessage `json:"lmcache.maru_pool_size,omitempty" jsonschema:"description=No effect."`
	UseGds                                    json.RawMessage `json:"lmcache.use_gds,omitempty" jsonschema:"description=No effect."`
	GdsBackend                                json.RawMessage `json:"lmcache.gds_backend,omitempty" jsonschema:"description=No effect."`
	AuditActualRemoteURL                      json.RawMessage `json:"lmcache.audit_actual_remote_url,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerHost                     json.RawMessage `json:"lmcache.internal_api_server_host,omitempty" jsonschema:"description=No effect."`
	ExtraConfig                               json.RawMessage `json:"lmcache.extra_config,omitempty" jsonschema:"description=No effect."`
	SaveUnfullChunk                           json.RawMessage `json:"lmcache.save_unfull_chunk,omitempty" jsonschema:"description=No effect."`
	ExternalLookupClient                      json.RawMessage `json:"lmcache.external_lookup_client,omitempty" jsonschema:"description=No effect."`
	PyEnableGC                                json.RawMessage `json:"lmcache.py_enable_gc,omitempty" jsonschema:"description=No effect."`
	NumaMode                                  json.RawMessage `json:"lmcache.numa_mode,omitempty" jsonschema:"description=No effect."`
	EnableAsyncLoading                        json.RawMessage `json:"lmcache.enable_async_loading,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerEnabled                  json.RawMessage `json:"lmcache.internal_api_server_enabled,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerPortStart                json.RawMessage `json:"lmcache.internal_api_server_port_start,omitempty" jsonschema:"description=No effect."`
	PriorityLimit                             json.RawMessage `json:"lmcache.priority_limit,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerIncludeIndexList         json.RawMessage `json:"lmcache.internal_api_server_include_index_list,omitempty" jsonschema:"description=No effect."`
	InternalAPIServerSocketPathPrefix         json.RawMessage `json:"lmcache.internal_api_server_socket_path_prefix,omitempty" jsonschema:"description=No effect."`
	RuntimePluginLocations                    json.RawMessage `json:"lmcache.runtime_plugin_locations,omitempty" jsonschema:"description=No effect."`
	StoragePlugins                            json.RawMessage `json:"lmcache.storage_plugins,omitempty" jsonschema:"description=No effect."`
	RemoteStoragePlugins                      json.RawMessage `json:"lmcache.remote_storage_plugins,omitempty" jsonschema:"description=No effect."`
	LookupTimeoutMs                           json.RawMessage `json:"lmcache.lookup_timeout_ms,omitempty" jsonschema:"description=No effect."`
	MinRetrieveTokens                         json.RawMessage `json:"lmcache.min_retrieve_tokens,omitempty" jsonschema:"description=No effect."`
	HitMissRatio                              json.RawMessage `json:"lmcache.hit_miss_ratio,omitempty" jsonschema:"description=No effect."`
	LookupServerWorkerIDs                     json.RawMessage `json:"lmcache.lookup_server_worker_ids,omitempty" jsonschema:"description=No effect."`
	EnableSchedulerBypassLookup               json.RawMessage `json:"lmcache.enable_scheduler_bypass_lookup,omitempty" jsonschema:"description=No effect."`
	ScriptAllowedImports                      json.RawMessage `json:"lmcache.script_allowed_imports,omitempty" jsonschema:"description=No effect."`
	RunScriptAPIEnabled                       json.RawMessage `json:"lmcache.run_script_api_enabled,omitempty" jsonschema:"description=No effect."`
	EnableLazyMemoryAllocator                 json.RawMessage `json:"lmcache.enable_lazy_memory_allocator,omitempty" jsonschema:"description=No effect."`
	LazyMemoryInitialRatio                    json.RawMessage `json:"lmcache.lazy_memory_initial_ratio,omitempty" jsonschema:"description=No effect."`
	LazyMemoryExpandTriggerRatio              json.RawMessage `json:"lmcache.lazy_memory_expand_trigger_ratio,omitempty" jsonschema:"description=No effect."`
	LazyMemoryStepRatio                       json.RawMessage `json:"lmcache.lazy_memory_step_ratio,omitempty" jsonschema:"description=No effect."`
	LazyMemorySafeSize                        json.RawMessage `json:"lmcache.lazy_memory_safe_size,omitempty" jsonschema:"description=No effect."`
	EnableChunkStatistics                     json.RawMessage `json:"lmcache.enable_chunk_statistics,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsAutoStartStatistics        json.RawMessage `json:"lmcache.chunk_statistics_auto_start_statistics,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsAutoExitTimeoutHours       json.RawMessage `json:"lmcache.chunk_statistics_auto_exit_timeout_hours,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsAutoExitTargetUniqueChunks json.RawMessage `json:"lmcache.chunk_statistics_auto_exit_target_unique_chunks,omitempty" jsonschema:"description=No effect."`
	ChunkStatisticsStrategy                   json.RawMessage `json:"lmcache.chunk_statistics_strategy,omitempty" jsonschema:"description=No effect."`
	EnableKvEvents                            json.RawMessage `json:"lmcache.enable_kv_events,omitempty" jsonschema:"description=No effect."`
	UseGpuConnectorV3                         json.RawMessage `json:"lmcache.use_gpu_connector_v3,omitempty" jsonschema:"description=No effect."`
	PinTimeoutSec                             json.RawMessage `json:"lmcache.pin_timeout_sec,omitempty" jsonschema:"description=No effect."`
	PinCheckIntervalSec                       json.RawMessage `json:"lmcache.pin_check_interval_sec,omitempty" jsonschema:"description=No effect."`
	RemoteConfigURL                           json.RawMessage `json:"lmcache.remote_config_url,omitempty" jsonschema:"description=No effect."`
	AppID                                     json.RawMessage `json:"lmcache.app_id,omitempty" jsonschema:"description=No effect."`
	EnableHiddenStateCache                    json.RawMessage `json:"lmcache.enable_hidden_state_cache,omitempty" jsonschema:"description=No effect."`
	MaxHiddenStateCPUSize                     json.RawMessage `json:"lmcache.max_hidden_state_cpu_size,omitempty" jsonschema:"description=No effect."`
	HiddenStateLayers                         json.RawMessage `json:"lmcache.hidden_state_layers,omitempty" jsonschema:"description=No effect."`
	HiddenStatesRetrieveMode                  json.RawMessage `json:"lmcache.hidden_states_retrieve_mode,omitempty" jsonschema:"description=No effect."`
	EnableXpyd                                json.RawMessage `json:"lmcache.enable_xpyd,omitempty" jsonschema:"description=No effect."`
	NixlPeerHost                              json.RawMessage `json:"lmcache.nixl_peer_host,omitempty" jsonschema:"description=No effect."`
	NixlPeerInitPort                          json.RawMessage `json:"lmcache.nixl_peer_init_port,omitempty" jsonschema:"description=No effect."`
	NixlPeerAllocPort                         json.RawMessage `json:"lmcache.nixl_peer_alloc_port,omitempty" jsonschema:"description=No effect."`
	NixlProxyHost                             json.RawMessage `json:"lmcache.nixl_proxy_host,omitempty" jsonschema:"description=No effect."`
	NixlProxyPort                             json.RawMessage `json:"lmcache.nixl_proxy_port,omitempty" jsonschema:"description=No effect."`
	NixlRole                                  json.RawMessage `json:"lmcache.nixl_role,omitempty" jsonschema:"description=No effect."`
	ControllerURL                             json.RawMessage `json:"lmcache.controller_url,omitempty" jsonschema:"description=No effect."`
	LmcacheWorkerPort                         json.RawMessage `json:"lmcache.lmcache_worker_port,omitempty" jsonschema:"description=No effect."`
	PluginLocations                           json.RawMessage `json:"lmcache.plugin_locations,omitempty" jsonschema:"description=No effect."`
	ExternalBackends                          json.RawMessage `json:"lmcache.external_backends,omitempty" jsonschema:"description=No effect."`
	NixlPeerPort                              json.RawMessage `json:"lmcache.nixl_peer_port,omitempty" jsonschema:"description=No effect."`

	// Names of earlier versions, in their published examples.
	EnableNixl          json.RawMessage `json:"lmcache.enable_nixl,omitempty" jsonschema:"description=No effect."`
	NixlEnableGC        json.RawMessage `json:"lmcache.nixl_enable_gc,omitempty" jsonschema:"description=No effect."`
	NixlReceiverHost    json.RawMessage `json:"lmcache.nixl_receiver_host,omitempty" jsonschema:"description=No effect."`
	NixlReceiverPort    json.RawMessage `json:"lmcache.nixl_receiver_port,omitempty" jsonschema:"description=No effect."`
	LookupURL           json.RawMessage `json:"lmcache.lookup_url,omitempty" jsonschema:"description=No effect."`
	DistributedURL      json.RawMessage `json:"lmcache.distributed_url,omitempty" jsonschema:"description=No effect."`
	ErrorHandling       json.RawMessage `json:"lmcache.error_handling,omitempty" jsonschema:"description=No effect."`
	WekaPath            json.RawMessage `json:"lmcache.weka_path,omitempty" jsonschema:"description=No effect."`
	CufileBufferSize    json.RawMessage `json:"lmcache.cufile_buffer_size,omitempty" jsonschema:"description=No effect."`
	BlendRecomputeRatio json.RawMessage `json:"lmcache.blend_recompute_ratio,omitempty" jsonschema:"description=No effect."`
	LocalDevice         json.RawMessage `json:"lmcache.local_device,omitempty" jsonschema:"description=No effect."`
	PipelinedBackend    json.RawMessage `json:"lmcache.pipelined_backend,omitempty" jsonschema:"description=No effect."`
}

// without are the names of Unused, without the prefix that they have in a transfer config.
func without() []string {
	fields := reflect.VisibleFields(reflect.TypeFor[Unused]())
	names := make([]string, len(fields))
	for i, f := range fields {
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names[i] = strings.TrimPrefix(tag, "lmcache.")
	}
	return names
}

// set are the names that have a value here.
func (u *Unused) set() (names []string) {
	value := reflect.ValueOf(u).Elem()
	for i, name := range without() {
		if raw, _ := reflect.TypeAssert[json.RawMessage](value.Field(i)); len(raw) > 0 && string(raw) != "null" && !switchedOff(name, string(raw)) {
			names = append(names, "lmcache."+name)
		}
	}
	return names
}
