"""When a step may wait for its load, instead of parking the request until the load is over.

A parked request costs a step that computes nothing, vLLM's pause behind it and another turn of the
scheduler: more than the load of a few blocks takes. A step that waits holds up nobody if there is no
other request, and is sure to be short if loads have been quick.
"""

from __future__ import annotations

from typing import Any

# What a step may wait: no longer than one of a large batch takes.
_QUICK = 0.05


class Pace:
    """How long loads have taken."""

    def __init__(self) -> None:
        """Begin without knowing anything."""
        self._last: tuple[float, float] | None = None  # seconds for a block, of the last two loads

    def took(self, seconds: float, blocks: int) -> None:
        """Note a load without a fault."""
        if blocks > 0:
            each = seconds / blocks
            self._last = (each, self._last[0] if self._last else each)

    def failed(self) -> None:
        """Note a load with a fault: the next one is not waited for."""
        self._last = None

    def quick(self, blocks: int) -> bool:
        """Say whether a load of so many blocks will be over soon."""
        return self._last is not None and max(self._last) * blocks <= _QUICK


def layers_may_wait(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Say whether whoever reads a layer of this model has waited for it, of an engine whose steps may wait.

    Attention waits for the layer that it is named after. Where layers of a group differ, one of them may be
    an index that is read before, and a drafter runs behind what a step reports.
    """
    specs = [getattr(group, "kv_cache_spec", None) for group in kv_cache_config.kv_cache_groups]
    alike = not any(hasattr(spec, "kv_cache_specs") for spec in specs)
    return alike and getattr(vllm_config, "speculative_config", True) is None


def steps_may_wait(vllm_config: Any, kv_cache_config: Any, groups: int) -> bool:
    """Say whether this engine can go on after a step whose load failed.

    vLLM gives the blocks of such a load their hashes before they are loaded, so nothing may be scheduled
    between the load and the news of its failure. Failed blocks have names only where there is one group.
    Blocks that vLLM zeroes would be zeroed after the load has begun. Engines that are parallel over data
    step together.
    """
    return (
        groups == 1
        and getattr(getattr(vllm_config, "scheduler_config", None), "async_scheduling", True) is False
        and all(getattr(vllm_config.parallel_config, f"{kind}_parallel_size", 2) == 1 for kind in ("pipeline", "data"))
        and getattr(kv_cache_config, "needs_kv_cache_zeroing", True) is False
    )
