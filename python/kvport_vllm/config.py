"""vLLM's --kv-transfer-config, and the one inside it that `kvport serve` takes.

The outer object is vLLM's: it names this class. kv_connector_extra_config is the inner one, exactly
what kvport takes elsewhere; what it leaves out of kv_role, engine_id and kv_load_failure_policy comes
from the outer one, so that nobody has to say anything twice.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from kvport_agent.binary import DEADLINES, checked, find_binary, seconds
from kvport_agent.errors import ConfigError

_SHARED = ("kv_role", "engine_id", "kv_load_failure_policy")
_INVENTED = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}(_dp\d+)?")
_MEMORY = ("auto", "adopt", "move", "mirror")


@dataclass(frozen=True)
class Config:
    """The inner config, complete, and this package's own settings."""

    text: str  # JSON, for kvport agent --kv-transfer-config
    engine: str
    role: str
    binary: str
    allow_weak_hashes: bool = False
    socket_dir: str = ""  # empty: the user's runtime folder
    memory: str = "auto"
    load_in_step: bool = True
    load_by_layer: bool = False
    transfer_seconds: float = DEADLINES["transfer"]  # deadline of one transfer, without its size
    transfer_per_gib: float = DEADLINES["transfer_per_gib"]
    later_seconds: float = DEADLINES["later"]  # how long a lookup may stay without an answer

    @property
    def loads(self) -> bool:
        """Whether this engine ever loads: a producer never does."""
        return self.role != "kv_producer"

    @property
    def saves(self) -> bool:
        """Whether this engine ever saves: a consumer never does."""
        return self.role != "kv_consumer"


def merge(outer: Any) -> Config:
    """Make the inner config of vLLM's KVTransferConfig complete; errors name the field."""
    inner = dict(outer.kv_connector_extra_config or {})
    where = "kv_connector_extra_config"
    if not isinstance(inner.get("kv_connector"), str):
        raise ConfigError(
            f"{where}.kv_connector: is missing; put the config of `kvport serve` here, such as "
            '{"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {...}}'
        )
    for field in _SHARED:
        if (value := _shared(outer, inner, field, where)) is not None:
            inner[field] = value
    own = _take_own(inner, where)
    settings = inner.get("kvport") or {}
    deadlines = settings.get("deadlines") or {} if isinstance(settings, dict) else {}
    deadlines = deadlines if isinstance(deadlines, dict) else {}
    return Config(
        text=json.dumps(inner, sort_keys=True),
        engine=str(inner.get("engine_id") or ""),
        role=str(inner.get("kv_role") or ""),
        binary=find_binary(),
        transfer_seconds=seconds(deadlines.get("transfer"), DEADLINES["transfer"]),
        transfer_per_gib=seconds(deadlines.get("transfer_per_gib"), DEADLINES["transfer_per_gib"]),
        later_seconds=seconds(deadlines.get("later"), DEADLINES["later"]),
        **own,
    )


def _shared(outer: Any, inner: dict[str, Any], field: str, where: str) -> Any:
    """Give the value of a field that both objects may have."""
    theirs, mine = getattr(outer, field, None), inner.get(field)
    if mine is None or theirs is None or mine == theirs:
        return theirs if mine is None else mine
    if field == "engine_id" and (invented := _INVENTED.fullmatch(str(theirs))):
        # vLLM makes an id up where there is none, and gives data parallel ranks a suffix.
        return str(mine) + (invented.group(1) or "")
    raise ConfigError(f"{where}.{field}: is {mine!r}, but vLLM's own {field} is {theirs!r}; leave one out or make them equal")


def _take_own(inner: dict[str, Any], where: str) -> dict[str, Any]:
    """Take out of inner.kvport what means this package and not the host."""
    settings = inner.get("kvport")
    if not isinstance(settings, dict):
        return {}
    settings = dict(settings)
    own: dict[str, Any] = {}
    for name, default in (("allow_weak_hashes", False), ("load_in_step", True), ("load_by_layer", False)):
        value = settings.pop(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{where}.kvport.{name}: is {value!r}, want true or false")
        own[name] = value
    if own["load_by_layer"] and not own["load_in_step"]:
        raise ConfigError(f"{where}.kvport.load_by_layer: is true, and load_in_step false: layers are waited for within a step")
    folder = settings.pop("agent_socket_dir", "")
    if not isinstance(folder, str):
        raise ConfigError(f"{where}.kvport.agent_socket_dir: is {folder!r}, want a path")
    own["socket_dir"] = folder
    memory = settings.pop("memory", "auto")
    if memory not in _MEMORY:
        raise ConfigError(f"{where}.kvport.memory: is {memory!r}, want one of {', '.join(_MEMORY)}")
    own["memory"] = memory
    inner["kvport"] = settings
    return own


def check(config: Config) -> bool:
    """Let kvport itself check the inner config, plugin's part included; say whether the connector may change bytes."""
    said = checked(config.binary, config.text)
    if said.error:
        raise ConfigError(f"kv_connector_extra_config: {said.error}")
    return said.lossy


def check_early(outer: Any) -> None:
    """Check all that can be known before a model loads."""
    check(merge(outer))
