"""The program kvport: where it is, and what it says of a config."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

_CHECK_TIMEOUT = 30.0
_STDIN = "/proc/self/fd/0"

# Deadlines of the host (kvport.deadlines) where a config names none: host.DefaultSettings, in seconds.
DEADLINES = {"later": 2.0, "transfer": 5.0, "transfer_per_gib": 1.0, "save": 30.0}


def seconds(value: Any, default: float) -> float:
    """Read a duration as the host does; what it refuses is for its own check to say."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, str):
        return default
    units = {"ms": 1e-3, "us": 1e-6, "h": 3600.0, "m": 60.0, "s": 1.0}
    total, rest = 0.0, value
    while rest:
        digits = len(rest) - len(rest.lstrip("0123456789."))
        unit = next((u for u in units if rest[digits:].startswith(u)), None)
        if not digits or unit is None:
            return default
        total += float(rest[:digits]) * units[unit]
        rest = rest[digits + len(unit) :]
    return total


def find_binary() -> str:
    """Find kvport: $KVPORT_BIN, beside the package (in the wheel), or on PATH."""
    if named := os.environ.get("KVPORT_BIN"):
        if not os.access(named, os.X_OK):
            raise ConfigError(f"KVPORT_BIN: {named} is not an executable file")
        return named
    packaged = pathlib.Path(__file__).resolve().parent / "bin" / "kvport"
    if os.access(packaged, os.X_OK):
        return str(packaged)
    if found := shutil.which("kvport"):
        return found
    raise ConfigError("no kvport binary: install the wheel that holds it, put kvport on PATH, or set KVPORT_BIN")


@dataclass(frozen=True)
class Checked:
    """What kvport says of a config: what is wrong, empty if nothing, and what the connector is like."""

    error: str
    lossy: bool = False  # it may load other bytes than were saved
    holds: bool = False  # it keeps blocks with their engine, and stores none
    scope: str = ""  # who sees what it stores: engine, node or shared


@functools.lru_cache(maxsize=8)
def checked(binary: str, text: str) -> Checked:
    """Let kvport itself check a config, plugin's part included."""
    command = [binary, "agent", "--check", "--kv-transfer-config", "@" + _STDIN]
    try:
        # A file that only it sees, and not an argument: arguments are public, and limited to 128 KiB.
        with open(os.memfd_create("kvport-config", os.MFD_CLOEXEC), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            done = subprocess.run(command, stdin=file, capture_output=True, text=True, timeout=_CHECK_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Checked(f"{binary} did not answer a check of the config within {_CHECK_TIMEOUT:.0f} s")
    if done.returncode == 0:
        try:
            said = json.loads(done.stdout)
            return Checked("", bool(said["lossy"]), "hold" in said.get("capabilities", ()), str(said.get("scope", "")))
        except (ValueError, KeyError, TypeError):
            return Checked(f"{binary} does not say whether the connector may change bytes: is it of another version?")
    why = (done.stderr or done.stdout).replace(_STDIN, "kv-transfer-config").strip()
    return Checked(why or f"{binary} refused the config with status {done.returncode}")
