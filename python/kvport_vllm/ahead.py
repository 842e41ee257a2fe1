"""Requests that wait are looked up together: vLLM asks about one after the other, and each answer is a message's way off."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

from .layout import full_attention
from .pins import Pins
from .tracking import Tracked

# Requests that are looked up beside the one that vLLM asks about. The agent takes no more of them.
AT_MOST = 63
# Block hashes of one call, those of the request that vLLM asks about included: the agent makes keys of all of them while the
# scheduler stands still. It also limits how many blocks are looked up in vLLM's pool, because a lookup there takes longer than
# sending a hash.
MOST_HASHES = 1024


def foreseeable(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Say whether what vLLM has cached of a request is what its pool has of the request's first blocks.

    With several groups it is what they have in common, and with a window blocks in front may be missing. With some kinds of
    speculative decoding vLLM computes the last cached block again.
    """
    speculation = getattr(vllm_config, "speculative_config", None)
    pops = speculation is not None and getattr(speculation, "use_eagle", lambda: True)()
    return full_attention(kv_cache_config) and not pops


class Ahead:
    """Who is to be looked up beside the request that vLLM asks about.

    They are as many as vLLM has got past in this pass of its scheduler, or as it asked about in its last one and not yet in this one.
    A queue of which it admits one in each pass has nobody looked up who is not asked about; a queue of hits needs a few calls.
    """

    def __init__(self, pins: Pins, block_tokens: int) -> None:
        """Take what shows vLLM's own cache."""
        self.on = False  # it can be told how much of a request vLLM has cached: see foreseeable
        self._pins = pins
        self._block_tokens = block_tokens
        self._refused = 0  # life of the agent that answers nothing ahead
        self._due: OrderedDict[str, Tracked] = OrderedDict()  # who waits and was not asked about in this pass, as vLLM's queue has them
        self._asked: list[Tracked] = []  # about whom vLLM asked in this pass
        self._last = 0  # how many these were in the last pass in which vLLM asked

    def wait(self, tracked: Tracked) -> None:
        """Take a request about which vLLM will ask: it is new, or was preempted."""
        tracked.waits = True
        self._due[tracked.id] = tracked

    def refused(self, life: int) -> None:
        """Note that the agent answers nothing ahead: its connector has what is asked for sent at once."""
        self._refused = life

    def asked(self, tracked: Tracked) -> None:
        """Note that vLLM asks about a request, which it will do again in its next pass unless it is admitted now."""
        if self._due.pop(tracked.id, None) is not None:
            self._asked.append(tracked)

    def admitted(self, tracked: Tracked) -> None:
        """Let go of a request that waits no more."""
        tracked.waits = False
        self._due.pop(tracked.id, None)

    def pass_over(self) -> None:
        """Note the end of a pass of vLLM's scheduler. Who was asked about and waits still comes first in the next one."""
        if not self._asked:
            return
        self._last = len(self._asked)
        for tracked in reversed(self._asked):
            if tracked.waits:
                self._due[tracked.id] = tracked
                self._due.move_to_end(tracked.id, last=False)
        self._asked = []

    def take(self, head: Tracked, life: int, now: float, most: int = MOST_HASHES) -> list[tuple[Tracked, int]]:
        """Give who is looked up now beside the request that vLLM asks about, each with the tokens that vLLM has cached of it."""
        out: list[tuple[Tracked, int]] = []
        asked = len(self._asked)
        number = min(AT_MOST, max(asked - 1, self._last - asked))
        if not self.on or self._refused == life or number <= 0:
            return out
        room = most - len(head.request.block_hashes)
        for tracked in itertools.islice(self._due.values(), 4 * AT_MOST):
            request = tracked.request
            if len(out) == number:
                break
            if tracked is head or len(request.block_hashes) > room or not tracked.can_be_asked(life, now):
                continue
            cached = self._pins.leading(request.block_hashes, (request.num_tokens - 1) // self._block_tokens)
            if cached is None:
                return []
            out.append((tracked, cached * self._block_tokens))
            room -= len(request.block_hashes)
        return out
