"""KV events: what the connector stores, published as vLLM publishes its own cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .tracking import Completion


class Events:
    """Events that wait to be taken. Blocks are named by vLLM's own hashes, as its other events are."""

    def __init__(self, block_tokens: int, api: EventApi | None, medium: str = "kvport") -> None:
        """Take vLLM's event types, or None where events are switched off."""
        self._block_tokens = block_tokens
        self._api = api
        self._medium = medium
        self._list: list[Any] = []

    def stored(self, done: Completion, failed: set[int]) -> None:
        """Publish the blocks of a save that is over, less those that were not stored."""
        if self._api is None or not done.ids:
            return
        request = done.tracked.request
        run: list[int] = []
        for i, block in enumerate(done.ids[0], done.first):
            if block in failed:
                self._publish(request, run)
                run = []
            else:
                run.append(i)
        self._publish(request, run)

    def _publish(self, request: Any, run: list[int]) -> None:
        if not run or self._api is None:
            return
        size = self._block_tokens
        hashes = request.block_hashes
        parent = self._api.external(hashes[run[0] - 1]) if run[0] else None
        adapter = getattr(request, "lora_request", None)
        self._list.append(
            self._api.stored(
                block_hashes=[self._api.external(hashes[i]) for i in run],
                parent_block_hash=parent,
                token_ids=list(request.all_token_ids[run[0] * size : (run[-1] + 1) * size]),
                block_size=size,
                lora_id=getattr(adapter, "adapter_id", None),
                medium=self._medium,
                lora_name=getattr(adapter, "lora_name", None),
            )
        )

    def cleared(self) -> None:
        """Publish that everything is gone."""
        if self._api is not None:
            self._list.append(self._api.cleared())

    def take(self) -> list[Any]:
        """Give the events since the last call."""
        taken, self._list = self._list, []
        return taken


class EventApi:
    """vLLM's event types."""

    def __init__(self, stored: Callable[..., Any], cleared: Callable[[], Any], external: Callable[[bytes], Any]) -> None:
        """Take the makers of BlockStored and AllBlocksCleared, and the public form of a hash."""
        self.stored = stored
        self.cleared = cleared
        self.external = external


def event_api(vllm_config: Any) -> EventApi | None:
    """Find vLLM's event types, if events are switched on."""
    config = getattr(vllm_config, "kv_events_config", None)
    if config is None or not getattr(config, "enable_kv_cache_events", False):
        return None
    from vllm.distributed.kv_events import AllBlocksCleared, BlockStored  # type: ignore[import-not-found,unused-ignore]
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # type: ignore[import-not-found,unused-ignore]

    return EventApi(BlockStored, AllBlocksCleared, maybe_convert_block_hash)
