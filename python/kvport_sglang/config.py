"""SGLang's --hicache-storage-backend-extra-config, and the object inside it that `kvport serve` takes.

The outer object is SGLang's: it names this class, and has settings of SGLang's own. kv_transfer_config is the
inner one, exactly what kvport takes elsewhere. kvport_sglang has the settings of this package.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from dataclasses import dataclass
from typing import Any

from kvport_agent.binary import Checked, checked, find_binary
from kvport_agent.errors import ConfigError, KvportError
from kvport_agent.spawn import Spawner

from . import deadlines

MODULE = "kvport_sglang"
_CLASS = "KvportHiCache"
_NAMES = {"backend_name": ("kvport",), "module_path": (MODULE, f"{MODULE}.backend"), "class_name": (_CLASS,)}
_INNER, _OWN = "kv_transfer_config", "kvport_sglang"
_ROLE = "kv_both"
_MIB = 1 << 20


@dataclass(frozen=True)
class Config:
    """The inner config, complete, and this package's own settings."""

    text: str  # JSON, for kvport agent --kv-transfer-config
    engine: str  # of this rank of this engine
    binary: str
    zero_copy: bool  # SGLang gives addresses in its pool (interface_v1), and not tensors
    exists_seconds: float = 0.05
    get_seconds: float = 5.0
    put_seconds: float = 30.0
    memory_bytes: int = 256 * _MIB  # of the agent: pages on their way
    socket_dir: str = ""  # empty: the user's runtime folder
    doubts: tuple[str, ...] = ()  # for the log


@dataclass(frozen=True)
class _Setting:
    default: float | str
    least: float = 0.0
    most: float = 0.0
    unit: str = ""


_SETTINGS = {
    "exists_ms": _Setting(50, 1, 60_000, "milliseconds"),
    "get_ms": _Setting(5_000, 1, 600_000, "milliseconds"),
    "put_ms": _Setting(30_000, 1, 600_000, "milliseconds"),
    "memory_bytes": _Setting(256 * _MIB, 1, 1 << 40, "bytes"),
    "agent_socket_dir": _Setting(""),
}


def meant(extra: dict[str, Any]) -> bool:
    """Say whether SGLang's extra config means this package, also by a wrong name."""
    package = str(extra.get("module_path", "")).split(".")[0]
    if package == MODULE:
        return True
    ours = _INNER in extra or _OWN in extra or extra.get("class_name") == _CLASS
    return ours and not (package and _there(package))


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # it was made by hand and not imported
        return True


def names(extra: dict[str, Any]) -> None:
    """Check the names by which SGLang finds the backend. What the backend is called is the user's choice."""
    for field, want in _NAMES.items():
        if field not in extra:
            raise ConfigError(f"{field}: is missing, want {want[0]}")
        if field != "backend_name" and extra[field] not in want:
            raise ConfigError(f"{field}: is {extra[field]!r}, want {want[0]}")


def parse(extra: Any, rank: str) -> Config:
    """Read SGLang's extra config for one rank; errors name the field."""
    if not isinstance(extra, dict):
        raise ConfigError(f"hicache_storage_backend_extra_config: is {extra!r}, want an object")
    inner = _inner(extra.get(_INNER))
    for name in extra:
        if name.startswith("kv") and name not in (_INNER, _OWN):
            raise ConfigError(
                f"{name}: is not known here; the config of `kvport serve` belongs into {_INNER}, settings of this package into {_OWN}"
            )
    for name in extra:
        if name in _SETTINGS:
            raise ConfigError(f"{name}: belongs into {_OWN}")
    if (role := inner.get("kv_role", _ROLE)) != _ROLE:
        raise ConfigError(f"{_INNER}.kv_role: is {role!r}, want {_ROLE}: SGLang counts on finding what it was told is stored")
    own = _own(extra.get(_OWN))
    engine = inner.get("engine_id", f"sglang-{uuid.uuid4().hex}")
    if not isinstance(engine, str) or not engine:
        raise ConfigError(f"{_INNER}.engine_id: is {engine!r}, want a name")
    engine = f"{engine}/{rank}"
    return Config(
        text=json.dumps({**deadlines.longer(inner, own), "engine_id": engine}, sort_keys=True),
        engine=engine,
        binary=find_binary(),
        zero_copy=bool(extra.get("interface_v1")),
        exists_seconds=float(own["exists_ms"]) / 1000,
        get_seconds=float(own["get_ms"]) / 1000,
        put_seconds=float(own["put_ms"]) / 1000,
        memory_bytes=int(own["memory_bytes"]),
        socket_dir=str(own["agent_socket_dir"]),
        doubts=tuple(deadlines.doubts(inner, own, extra.get(_OWN) or {})),
    )


def _inner(given: Any) -> dict[str, Any]:
    """Take the config of kvport, whose content is for kvport itself to check."""
    if isinstance(given, str):
        raise ConfigError(
            f"{_INNER}: is text, want the object itself; what is in a file is given by --hicache-storage-backend-extra-config @FILE.json"
        )
    if not isinstance(given, dict) or not given:
        raise ConfigError(
            f"{_INNER}: is missing; put the config of `kvport serve` here, such as "
            '{"kv_connector": "NAME", "kv_role": "kv_both", "kv_connector_extra_config": {...}}'
        )
    if given.get("kv_connector_module_path") == MODULE or _INNER in given:
        raise ConfigError(f"{_INNER}: is the outer object of SGLang's config; give the inner one")
    return given


def _own(given: Any) -> dict[str, float | str]:
    """Read this package's own settings."""
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{_OWN}: is {given!r}, want an object")
    for name in given:
        if name not in _SETTINGS:
            raise ConfigError(f"{_OWN}.{name}: is not known, want one of {', '.join(_SETTINGS)}")
    return {name: _value(name, given.get(name, s.default), s) for name, s in _SETTINGS.items()}


def _value(name: str, value: Any, setting: _Setting) -> float | str:
    if isinstance(setting.default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{_OWN}.{name}: is {value!r}, want a path")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not setting.least <= value <= setting.most:
        raise ConfigError(f"{_OWN}.{name}: is {value!r}, want {setting.least:.0f} to {setting.most:.0f} {setting.unit}")
    return value


def check(config: Config) -> Checked:
    """Let kvport itself check the inner config, plugin's part included; give what it says of the connector."""
    said = checked(config.binary, config.text)
    if said.error:
        raise ConfigError(f"{_INNER}: {said.error}")
    if said.lossy:
        raise ConfigError(f"{_INNER}: the connector may load other bytes than were saved, and SGLang shares pages among requests")
    if said.holds:
        raise ConfigError(f"{_INNER}.kv_connector: keeps blocks with their engine and stores none, so it cannot keep pages")
    return said


def spawner(config: Config, name: str) -> Spawner:
    """Make what starts the agent of that name; what is wrong with the folder of its socket is wrong in the config."""
    try:
        return Spawner(config.binary, config.text, name, config.socket_dir)
    except KvportError as err:
        raise ConfigError(f"{_OWN}.{err}") from err
