"""Deadlines of this package beside those of others: the host ends work by its own, and SGLang waits by its own."""

from __future__ import annotations

import math
from typing import Any

from kvport_agent.binary import DEADLINES, seconds

# From the deadline that the agent was told until it counts as stuck, and is ended, in seconds.
GRACE = 1.0
# Which deadline of the host (kvport.deadlines) ends what ours waits for. A get and a put are several loads and saves.
_HOST = {"exists_ms": "later", "get_ms": "transfer", "put_ms": "save"}
# How long SGLang waits for each of its storage threads when it empties its caches, in seconds. If one has not ended then, SGLang ends.
_JOIN = 10.0


def _named(inner: dict[str, Any]) -> dict[str, Any] | None:
    """Give the host's deadlines that a config names; None: the host will say what is wrong with them."""
    settings = inner.get("kvport", {})
    named = settings.get("deadlines", {}) if isinstance(settings, dict) else None
    return named if isinstance(named, dict) else None


def longer(inner: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Make the host's deadlines as long as ours, where the config names none."""
    named = _named(inner)
    if named is None:
        return inner
    more = {host: f"{math.ceil(own[ours])}ms" for ours, host in _HOST.items() if host not in named and own[ours] / 1000 > DEADLINES[host]}
    return {**inner, "kvport": {**inner.get("kvport", {}), "deadlines": {**named, **more}}} if more else inner


def doubts(inner: dict[str, Any], own: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Say which of the given settings the host cuts short, and which make SGLang wait longer than it does."""
    named = _named(inner) or {}
    out: list[str] = []
    for ours, host in _HOST.items():
        if ours in given and own[ours] / 1000 > seconds(named.get(host), math.inf):
            out.append(f"{ours}: is {own[ours]}, but kvport.deadlines.{host} is {named[host]!r} and ends the connector's work earlier")
    for ours, more in (("exists_ms", 0.0), ("get_ms", GRACE)):
        if own[ours] / 1000 + more >= _JOIN:
            out.append(
                f"{ours}: is {own[ours]}, want less than {1000 * (_JOIN - more):.0f}: SGLang waits {_JOIN:.0f} s for a call "
                "when it empties its caches, and ends if one takes longer"
            )
    return out
