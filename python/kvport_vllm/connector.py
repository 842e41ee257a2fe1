"""KvportConnector: vLLM's hooks. Each is one line to the side that knows what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from kvport_agent.guard import Faults, guarded, startup
from kvport_agent.messages import REASON_ABORT, REASON_ERROR, REASON_LENGTH, REASON_STOP

from . import config as config_
from . import setup
from .meta import StepMetadata
from .vllm_api import HAS_FAILED_RECVING, KVConnectorBase_V1, KVConnectorRole, SupportsHMA, TransferResults

log = logging.getLogger("vllm.kvport")

_REASONS = {
    "FINISHED_STOPPED": REASON_STOP,
    "FINISHED_REPETITION": REASON_STOP,
    "FINISHED_LENGTH_CAPPED": REASON_LENGTH,
    "FINISHED_ABORTED": REASON_ABORT,
}


class KvportConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Any kvport plugin as vLLM's KV connector; all state is in the agent and the plugin."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Check what vLLM gives us; errors here are for the user, later there are none."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.faults = Faults()
        self.config = config_.merge(self._kv_transfer_config)
        lossy = config_.check(self.config)
        self.parts = setup.Parts(vllm_config, kv_cache_config, self.config, lossy)
        self.scheduler: Any = None
        self.worker: Any = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = self.parts.scheduler()
        else:
            self.worker = self.parts.worker()

    # -- class-level hooks

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Take any layout: blocks are opaque, strides say where they are."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Say whether layers are waited for one by one: only then must graphs be in pieces."""
        settings = extra_config.get("kvport")
        return isinstance(settings, dict) and settings.get("load_by_layer") is True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Make stats of what travelled to the API server."""
        from .prom import KvportStats

        return KvportStats(data=data or {"counts": {}, "gauges": {}})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> Any:
        """Show the agent's metrics on vLLM's own /metrics."""
        from .prom import KvportPromMetrics

        return KvportPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker

    @guarded(lambda: None)
    def get_mem_pool_context(self) -> Any:
        """Put the cache into memory that the plugin can map."""
        return self.parts.adoption()

    @startup
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Share the cache and attach; the last rank's answer says whether the connector opened."""
        self.parts.register(self.worker, kv_caches)

    @guarded(lambda: None)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take what a step began."""
        super().bind_connector_metadata(connector_metadata)
        self.worker.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Wait for the load of this very step, if it has one. Others have begun, and their requests are parked."""
        self._wait(self.worker.wait_for_loads)

    def _wait(self, wait: Callable[..., None], *args: str) -> None:
        """Wait for loads of this very step. Where that fails, they have failed: vLLM would compute on anything."""
        try:
            wait(*args)
        except Exception:
            self.faults.add(wait.__name__)
            self.worker.give_up_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer of what this very step loads, if it is loaded layer by layer. No layer runs on other loads."""
        if self.worker.unread:
            self._wait(self.worker.wait_for_layer, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are saved from where they lie, once their step is over."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Note that the step's blocks are in the cache."""
        self.worker.forward_over()

    @guarded(lambda: TransferResults() if TransferResults is not None else None)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report transfers that are over, each once."""
        self._wait(self.worker.wait_for_verdicts)
        sent, received, failed = self.worker.results()
        if failed and not HAS_FAILED_RECVING:
            return TransferResults(finished_sending=sent, finished_recving=received)
        return TransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report transfers that are over, to a vLLM that does not know get_transfer_results."""
        self._wait(self.worker.wait_for_verdicts)
        sent, received, _ = self.worker.results()
        return sent or None, received or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report blocks that could not be loaded."""
        return self.worker.take_invalid()  # type: ignore[no-any-return]

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> Any:
        """Tell the scheduler's side that completed blocks are true."""
        return self.worker.done()

    # -- scheduler

    @guarded(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Pin blocks in vLLM's own pool."""
        self.scheduler.pins.bind(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """Note a request, before it is looked up."""
        self.scheduler.new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer what the connector has beyond the local cache."""
        return self.scheduler.match(request, num_computed_tokens)  # type: ignore[no-any-return]

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin the load of an admitted request."""
        self.scheduler.admitted(request)
        if num_external_tokens > 0:
            self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Send what the scheduler decided. A load that was announced to vLLM must end, whatever goes wrong."""
        try:
            return self.scheduler.build(scheduler_output)  # type: ignore[no-any-return]
        except Exception:
            self.faults.add("build_connector_meta")
            return self.scheduler.emergency()  # type: ignore[no-any-return]

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Offer what a step completed."""
        self.scheduler.step_over(connector_output)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End a request, for a vLLM without hybrid groups."""
        return self._finished(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """End a request; a ticket for its consumer goes into the response."""
        return self._finished(request, block_ids)

    def _finished(self, request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        reason = _REASONS.get(request.status.name, REASON_ERROR)
        normal = reason in (REASON_STOP, REASON_LENGTH)
        return self.scheduler.finished(request, tables, reason, normal)  # type: ignore[no-any-return]

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        """Publish what was stored."""
        return self.scheduler.events.take()  # type: ignore[no-any-return]

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> Any:
        """Give the agent's counters, once for the engine."""
        if self.scheduler is None:
            return None
        counters = self.scheduler.counters
        for hook, n in self.faults.counts.items():
            counters.total("kvport_shim_faults_total", n, ["hook", hook])
        data = counters.take()
        return None if data is None else self.build_kv_connector_stats(data)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while blocks are pinned: their release is read in steps."""
        return self.scheduler.busy()  # type: ignore[no-any-return]

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Empty the connector's cache."""
        return self.scheduler.reset()  # type: ignore[no-any-return]

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that did not happen is a recomputation, never a loss."""
        return False

    # -- both

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Leave the agent, which ends when all have left."""
        for side in (self.scheduler, self.worker):
            if side is not None:
                side.close()
