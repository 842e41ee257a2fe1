"""Requests that wait are looked up together: vLLM asks about one after the other, and each answer is a message's way off."""

from __future__ import annotations

import itertools
from typing import Any

from .layout import full_attention
from .pins import Pins
from .tracking import Tracked

# Requests that are looked up beside the one that vLLM asks about. The agent takes no more of them.
AT_MOST = 63
# Block hashes of one call, those of the request that vLLM asks about included: the agent makes keys of all of them while the
# scheduler stands still. As many blocks at most are looked for in vLLM's pool, which takes longer than to send their hashes.
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

    A request is looked up ahead once, once more when the agent has news of it, and again when vLLM has asked about it without
    admitting it. So one that waits for long in vLLM's queue costs two questions more than without this.
    Of those that vLLM has not asked about yet only as many are known to the agent as one call takes.
    """

    def __init__(self, pins: Pins, block_tokens: int) -> None:
        """Take what shows vLLM's own cache."""
        self.on = False  # it can be told how much of a request vLLM has cached: see foreseeable
        self._pins = pins
        self._block_tokens = block_tokens
        self._refused = 0  # life of the agent that answers nothing ahead
        self._due: dict[str, Tracked] = {}
        self._asked: dict[str, Tracked] = {}  # about whom vLLM asked in this pass of its scheduler
        self._foretold: set[str] = set()  # who was looked up, and vLLM has not asked yet

    def wait(self, tracked: Tracked) -> None:
        """Take a request about which vLLM will ask: it is new, was preempted, or its agent is gone with all answers."""
        tracked.waits, tracked.stuck, tracked.news = True, False, False
        self._due[tracked.id] = tracked

    def news(self, tracked: Tracked) -> None:
        """Note that the agent would answer a question about a request by now. It says so also whenever it stops looking."""
        if tracked.waits and not tracked.news:
            tracked.news = True
            self._due[tracked.id] = tracked

    def refused(self, life: int) -> None:
        """Note that the agent answers nothing ahead: its connector has what is asked for sent at once."""
        self._refused = life

    def asked(self, tracked: Tracked) -> None:
        """Note that vLLM asks about a request, which it will do again in its next pass unless it is admitted now."""
        self._due.pop(tracked.id, None)
        self._foretold.discard(tracked.id)
        tracked.news = False
        if tracked.waits:
            self._asked[tracked.id] = tracked

    def admitted(self, tracked: Tracked) -> None:
        """Let go of a request that waits no more."""
        tracked.waits = False
        self._due.pop(tracked.id, None)
        self._asked.pop(tracked.id, None)
        self._foretold.discard(tracked.id)

    def pass_over(self) -> None:
        """Note the end of a pass of vLLM's scheduler. Who was asked about comes first in the next one."""
        for tracked in self._asked.values():
            tracked.stuck = not tracked.later_since  # it has its answer, and there was no room for it
        if self._asked:
            self._due = {**self._asked, **self._due}
            self._asked = {}

    def take(self, head: Tracked, life: int, now: float, most: int = MOST_HASHES) -> list[tuple[Tracked, int]]:
        """Give who is looked up now beside the request that vLLM asks about, each with the tokens that vLLM has cached of it.

        It is nobody beside a request that has its answer and was not admitted: vLLM does not get past it.
        """
        out: list[tuple[Tracked, int]] = []
        if not self.on or self._refused == life or head.stuck:
            return out
        room = most - len(head.request.block_hashes)
        new = AT_MOST - len(self._foretold)
        for tracked in itertools.islice(self._due.values(), 4 * AT_MOST):
            request, first = tracked.request, tracked.id not in self._foretold
            if len(out) == AT_MOST:
                break
            if tracked is head or len(request.block_hashes) > room or (first and not new) or not tracked.can_be_asked(life, now):
                continue
            cached = self._pins.leading(request.block_hashes, (request.num_tokens - 1) // self._block_tokens)
            if cached is None:
                return []
            out.append((tracked, cached * self._block_tokens))
            room, new = room - len(request.block_hashes), new - first
        for tracked, _ in out:
            del self._due[tracked.id]
            self._foretold.add(tracked.id)
        return out
