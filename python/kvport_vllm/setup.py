"""Putting the two sides together from what vLLM gives a connector at start."""

from __future__ import annotations

import logging
from typing import Any

from kvport_agent.content import ContentCache, digest
from kvport_agent.errors import KvportError, UnsupportedError
from kvport_agent.link import Link
from kvport_agent.messages import SIDE_SCHEDULER, SIDE_WORKER, message
from kvport_agent.spawn import Spawner

from . import fingerprint, keys, memory
from . import layout as layout_
from .ahead import foreseeable
from .config import Config
from .events import Events, event_api
from .lora import Adapters
from .pace import layers_may_wait, steps_may_wait
from .scheduler import SchedulerSide
from .vllm_api import HAS_FAILED_RECVING, HAS_WORKER_METADATA
from .worker import WorkerSide

log = logging.getLogger("vllm.kvport")

# An engine that is still starting may wait; one that runs never does.
_START_WAIT = 30.0


class Parts:
    """One connector's parts, and what both sides say of themselves when they attach."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: Config, lossy: bool) -> None:
        """Check everything that can be refused before anything is started."""
        self._vllm = vllm_config
        self._cache = kv_cache_config
        self._config = config
        self._lossy = lossy
        self._check_sharing()
        parallel = vllm_config.parallel_config
        for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, field, 1) > 1:
                raise UnsupportedError(f"{field} is {getattr(parallel, field)}: kvport does not serve context parallelism")
        self.groups = layout_.groups_of(kv_cache_config)
        self._hashes = keys.check_algorithm(vllm_config.cache_config.prefix_caching_hash_algo, config.allow_weak_hashes)
        self._check_hash_size()
        if not HAS_WORKER_METADATA:
            raise UnsupportedError("this vLLM has no KVConnectorWorkerMetadata: nothing would say when blocks are computed")
        if len(self.groups) > 1 and not HAS_FAILED_RECVING:
            raise UnsupportedError("this vLLM cannot be told of failed loads with several KV cache groups (no failed_recving)")
        self._content = ContentCache()
        self._context: Any = None
        self._attach: Any = None
        self._fd: int | None = None

    def _check_hash_size(self) -> None:
        size = getattr(self._vllm.cache_config, "hash_block_size", None) or self.block_tokens
        if size != self.block_tokens:
            raise UnsupportedError(f"block hashes of {size} tokens for blocks of {self.block_tokens}: kvport needs one for each block")

    def _check_sharing(self) -> None:
        """Refuse what would give other requests bytes that nobody has verified: vLLM's cache shares whatever it has."""
        if self._lossy and self._config.loads and getattr(self._vllm.cache_config, "enable_prefix_caching", True):
            raise UnsupportedError(
                "the connector may load other bytes than were saved, and vLLM's prefix cache would share them with other requests: "
                "use --no-enable-prefix-caching"
            )

    @property
    def block_tokens(self) -> int:
        """Give the tokens of a block, the same in all groups."""
        return self.groups[0].block_tokens

    def _spawner(self) -> Spawner:
        c = self._config
        return Spawner(c.binary, c.text, c.engine, c.socket_dir)

    # -- scheduler

    def scheduler(self) -> SchedulerSide:
        """Make the scheduler's side and attach it, if the agent is there by now."""
        attach = message("AgentAttach")(version=1, side=SIDE_SCHEDULER, engine=self._config.engine, hashes=self._hashes)
        attach.world = self._vllm.parallel_config.world_size
        link = Link(self._spawner(), lambda: (attach, None))
        events = Events(self.block_tokens, event_api(self._vllm))
        side = SchedulerSide(link, self.block_tokens, len(self.groups), Adapters(self._content), events)
        side.may_wait = self._config.load_in_step and steps_may_wait(self._vllm, self._cache, len(self.groups))
        side.by_layer = self._by_layer(side.may_wait)
        side.ahead.on = foreseeable(self._vllm, self._cache)
        side.lossy = self._lossy
        side.allow_later(self._config.later_seconds)
        self._wait(link)
        side.begin()
        return side

    def _by_layer(self, may_wait: bool) -> bool:
        if not self._config.load_by_layer:
            return False
        if may_wait and layers_may_wait(self._vllm, self._cache):
            return True
        log.warning("kvport: load_by_layer has no effect: steps of this engine cannot wait for layers of their loads")
        return False

    def _wait(self, link: Link) -> None:
        """Wait for the agent while the engine starts. A refusal is for the user; lateness is not."""
        if link.wait_up(_START_WAIT):
            return
        if link.refused is not None:
            raise KvportError(f"kvport agent: {link.refused}")
        log.warning("kvport: the agent is not there yet; going on without external KV until it is")

    # -- worker

    def worker(self) -> WorkerSide:
        """Make a worker's side; it attaches when it has its cache."""
        link = Link(self._spawner(), lambda: (self._attach, self._fd))
        c = self._config
        return WorkerSide(link, len(self.groups), c.transfer_seconds, c.transfer_per_gib)

    def adoption(self) -> Any:
        """Make the context in which the cache's allocation comes from shared memory."""
        if self._config.memory not in ("auto", "adopt"):
            return None
        from .torchmem import Adoption

        tensors = getattr(self._cache, "kv_cache_tensors", None) or []
        sizes = {t.size for t in tensors}
        # How many pieces a block has is known only later; 64 for each layer is more than any layout makes.
        pieces = sum(1 + 64 * len(g.layers) for g in self.groups)
        room = len(self.groups) * layout_.ALIGN + self._cache.num_blocks * pieces * layout_.DIGEST_BYTES
        self._context = Adoption(sizes, min(room, max(sizes, default=0) // 8 + (1 << 20)))
        return self._context

    def register(self, side: WorkerSide, caches: dict[str, Any]) -> None:
        """Share the cache, say what it is, and attach."""
        from .torchmem import TorchTensors

        mine = {name: caches[name] for g in self.groups for name in g.layers if name in caches}
        memfd = self._context.memfd if self._context is not None else None
        blocks = self._cache.num_blocks
        tensors = TorchTensors()
        shared = memory.share(tensors, mine, self.groups, blocks, memfd, self._config.memory)
        side.shared = shared
        side.layers = layout_.layer_numbers(self.groups, {name: tensors.view(tensor) for name, tensor in mine.items()})
        side.block_bytes = sum(s.bytes for s in shared.segments)
        self._attach = self._describe(shared, blocks)
        self._fd = shared.memfd.fd
        log.info("kvport: %d bytes of KV cache are shared (%s); %s", shared.memfd.size, shared.how, self._attach.shape_text)
        self._wait(side.link)

    def _describe(self, shared: memory.Shared, blocks: int) -> Any:
        parallel = self._vllm.parallel_config
        name = self._layout_name()
        text = fingerprint.shape_text(self._vllm, self._cache, self.groups, name, shared.how)
        attach = message("AgentAttach")(version=1, side=SIDE_WORKER, engine=self._config.engine, hashes=self._hashes)
        attach.rank, attach.world = parallel.rank, parallel.world_size
        attach.model = fingerprint.model_fingerprint(self._vllm, self._content)
        attach.shape, attach.shape_text = digest(["kvport/vllm-shape/1", text]), text
        attach.layout.CopyFrom(layout_.to_message(f"vllm/{name}", self.groups, shared.segments, blocks))
        attach.region = shared.memfd.size
        attach.events = event_api(self._vllm) is not None
        return attach

    def _layout_name(self) -> str:
        for owner, field in ((self._cache, "kv_cache_layout"), (self._vllm.cache_config, "kv_cache_layout")):
            if name := getattr(owner, field, None):
                return str(name)
        return "default"
