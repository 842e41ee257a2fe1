"""What must be seen before SGLang makes a storage backend: a wrong config, which files are loaded, and who changes weights.

SGLang calls register in each of its processes, since the wheel names it as an entry point of sglang.srt.plugins.
"""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

from kvport_agent.errors import ConfigError

from . import config, loaded, weights

log = logging.getLogger("sglang.kvport")

_TARGET = "sglang.srt.managers.scheduler.Scheduler.__init__"
_EXTRA = "hicache_storage_backend_extra_config"


def register() -> None:
    """Have SGLang call check before it makes a scheduler, which loads the model, and made afterwards; tell weights of changes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

    HookRegistry.register(_TARGET, check, HookType.BEFORE)
    HookRegistry.register(_TARGET, made, HookType.AFTER)
    weights.register(HookRegistry, HookType)


def check(_scheduler: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Raise if this scheduler would use kvport with a config that cannot work. Other schedulers are none of ours."""
    weights.look()
    loaded.FILES.note(server_args)
    why = _unused(server_args)
    try:
        extra = _read(getattr(server_args, _EXTRA, None))
    except (OSError, ValueError) as err:
        if why:
            return  # SGLang does not read it either
        raise ConfigError(f"{_EXTRA}: {err}") from err
    if not config.meant(extra):
        return
    if why:
        log.warning("kvport: nothing is stored: the config names kvport, and %s", why)
        return
    config.names(extra)
    parsed = config.parse(extra, "early")
    config.check(parsed)
    config.spawner(parsed, "early")


def made(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    """Note what SGLang has fetched to load it."""
    loaded.FILES.fetched()


def _unused(server_args: Any) -> str:
    """Say why SGLang uses no storage backend that is named in its config; empty if it does."""
    if (backend := getattr(server_args, "hicache_storage_backend", None)) != "dynamic":
        return f"--hicache-storage-backend is {backend}, want dynamic"
    offloads = getattr(server_args, "disaggregation_decode_enable_offload_kvcache", False)
    if not offloads and not getattr(server_args, "enable_hierarchical_cache", True):
        return "--enable-hierarchical-cache is not given"
    return ""


def _read(given: Any) -> dict[str, Any]:
    """Read the extra config as SGLang will, but no other files than those of JSON."""
    if isinstance(given, str) and given.startswith("@"):
        path = pathlib.Path(given[1:])
        given = path.read_text(encoding="utf-8") if path.suffix.lower() == ".json" else None
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except ValueError as err:
            raise ValueError(f"is no JSON: {err}") from err
    if not isinstance(given or {}, dict):
        raise ValueError("is no JSON object")
    return given or {}
