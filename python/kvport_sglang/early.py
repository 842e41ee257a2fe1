"""What must be seen before SGLang makes a storage backend: a wrong config, before the model loads, and who changes weights.

SGLang calls register in each of its processes, since the wheel names it as an entry point of sglang.srt.plugins.
"""

from __future__ import annotations

import json
from typing import Any

from . import config, weights

_TARGET = "sglang.srt.managers.scheduler.Scheduler.__init__"


def register() -> None:
    """Have SGLang call check before a scheduler, which loads the model, is made, and tell weights of changes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore[import-not-found,unused-ignore]

    HookRegistry.register(_TARGET, check, HookType.BEFORE)
    weights.register(HookRegistry, HookType)


def check(_scheduler: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Raise if this scheduler would use kvport with a config that cannot work. Other schedulers are none of ours."""
    weights.look()
    if getattr(server_args, "hicache_storage_backend", None) != "dynamic":
        return
    extra = getattr(server_args, "hicache_storage_backend_extra_config", None)
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:  # a file: SGLang's to read
            return
    if isinstance(extra, dict) and str(extra.get("module_path", "")).split(".")[0] == config.MODULE:
        config.check(config.parse(extra, "early"))
