"""What an adapter adds to the keys of its blocks.

vLLM puts an adapter's name into its hashes. Two engines may give one name to two adapters, and one
engine may reload a name with new weights, so outside of an engine the content must be in the key.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import pathlib
from typing import Any

from kvport_agent.content import ContentCache, content_of_files, digest


class Adapters:
    """Content hashes of adapters, found off the engine's thread."""

    def __init__(self, cache: ContentCache) -> None:
        """Remember contents in cache."""
        self._cache = cache
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._found: dict[tuple[str, int], concurrent.futures.Future[bytes]] = {}

    def content(self, adapter: Any) -> bytes | None:
        """Give the adapter's content hash; None while it is being read. Raises what reading it raised."""
        path = str(getattr(adapter, "lora_path", ""))
        try:
            stamp = max((p.stat().st_mtime_ns for p in _files(path)), default=0)
        except OSError:
            stamp = 0
        found = self._found.get((path, stamp))
        if found is None:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(1, "kvport-lora")
            found = self._found[path, stamp] = self._pool.submit(self._read, path)
        return found.result() if found.done() else None

    def _read(self, path: str) -> bytes:
        return digest(["kvport/vllm-lora/1", *content_of_files(pathlib.Path(path), self._cache)])

    def close(self) -> None:
        """Stop reading."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _files(path: str) -> list[pathlib.Path]:
    root = pathlib.Path(path)
    return [root] if root.is_file() else [p for p in root.iterdir() if p.is_file()]


def with_adapter(key: bytes, content: bytes) -> bytes:
    """Make the key of a block that an adapter took part in."""
    return hashlib.sha256(key + content).digest()
