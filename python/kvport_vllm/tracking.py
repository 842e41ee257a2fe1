"""What the scheduler's side knows of each live request."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

from .keys import Keys

TICKET = "kvport_ticket"
# What an agent takes, in bytes: it ends a connection that brings more, and both may come from a client.
MOST_NAME, MOST_TICKET = 1 << 10, 64 << 10


@dataclass(slots=True)
class Tracked:
    """A request between on_new_request and request_finished."""

    request: Any  # vLLM's Request, alive as long as this is
    id: str
    keys: Keys | None  # None: the adapter's content is not known yet
    ticket: bytes = b""
    remote: bool = False  # a consumer will come for its blocks
    usable: bool = True  # False: nothing of it can be named outside of this engine
    denied: bool = False  # a load left nothing valid: asking again would never end
    told: int = 0  # life of the agent that knows of it
    have: int = 0  # leading blocks that the connector has, or is being given
    unverified: bool = False  # it was given a load that nobody can verify, which the agent knows
    private: bool = False  # ... and which an agent knew that is gone: nothing of it may be saved or handed over
    waits: bool = False  # to be admitted, so that vLLM will ask about it
    query: Any = None  # the question about it, while it waits
    asked_at: int = 0  # computed tokens of the last lookup
    at_once: bool = False  # the load that was offered is one that the step waits for
    load_began: float = 0.0
    later_since: float = 0.0  # 0: not waiting for an answer
    ask_again: float = 0.0
    memo: tuple[int, int] | None = None  # lookup that was answered: computed tokens, hashes
    memo_until: float = 0.0
    memo_tokens: int | None = 0  # None: there is no answer yet
    tables: list[list[int]] = field(default_factory=list)  # only where vLLM shows none

    def remembers(self, computed: int, now: float) -> bool:
        """Say whether the memo answers a question: of as many blocks, and from a token up to which it says something."""
        if self.memo is None or now >= self.memo_until or self.memo[1] != len(self.request.block_hashes):
            return False
        first = self.memo[0]
        return first == computed or (first < computed and (self.memo_tokens is None or computed <= first + self.memo_tokens))

    def can_be_asked(self, life: int, now: float) -> bool:
        """Say whether a question ahead makes sense: the agent knows the request, would not say the same again, and spends nothing.

        A ticket counts as used once it was asked with.
        """
        fresh = self.memo is not None and now < self.memo_until
        later = bool(self.later_since) and now < self.ask_again
        out = self.denied or bool(self.ticket) or self.keys is None or getattr(self.request, "skip_reading_prefix_cache", False)
        return self.told == life and not (fresh or later or out)


@dataclass(slots=True)
class Completion:
    """Blocks of one request that one engine step completes."""

    tracked: Tracked
    first: int
    end: int
    ids: list[list[int]]  # by group, of blocks first..end


def ticket_of(params: Any) -> bytes:
    """Read the ticket of a request's kv_transfer_params; what is no ticket is none."""
    if not isinstance(params, dict) or not params.get("do_remote_prefill"):
        return b""
    text = params.get(TICKET)
    if not isinstance(text, str):
        return b""
    try:
        ticket = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
    return ticket if len(ticket) <= MOST_TICKET else b""


def can_be_named(request: Any) -> bool:
    """Say whether an agent takes a request's id."""
    try:
        return 0 < len(request.request_id.encode()) <= MOST_NAME
    except UnicodeEncodeError:
        return False


def params_with(ticket: bytes) -> dict[str, Any]:
    """Make the kv_transfer_params of an answer, for whoever fetches this request's blocks.

    The other fields are there because routers copy them; with a ticket nobody reads them.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        TICKET: base64.b64encode(ticket).decode("ascii"),
    }


def wants_remote(params: Any) -> bool:
    """Say whether a router announced a consumer."""
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))
