"""What this package raises while an engine starts. Later on nothing is raised: see guard."""

from __future__ import annotations


class KvportError(Exception):
    """A reason not to start, with what to do about it."""


class ConfigError(KvportError, ValueError):
    """A wrong value in --kv-transfer-config; the text begins with the field."""


class UnsupportedError(KvportError):
    """Something in the model or engine that kvport cannot serve; the text names it."""
