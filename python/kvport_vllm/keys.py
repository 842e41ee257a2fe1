"""Keys of blocks: vLLM's own block hashes, where those can be trusted outside of one process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvport_agent.errors import UnsupportedError

from .lora import with_adapter

KEY_BYTES = 32
PARTIAL = bytes(KEY_BYTES)  # a partial block has no content address

_STRONG = ("sha256", "sha256_cbor")


def check_algorithm(name: str, allow_weak: bool) -> str:
    """Give the name of the engine's hashes for the agent, or say why they will not do."""
    if name in _STRONG:
        return f"vllm/{name}"
    if not allow_weak:
        raise UnsupportedError(
            f"--prefix-caching-hash-algo {name}: not collision resistant or not stable over processes, so a block could be "
            "taken for another one; use sha256 or sha256_cbor, or set kvport.allow_weak_hashes if all prompts are yours"
        )
    return f"vllm/{name}"


class Keys:
    """Turns block hashes into keys of 32 bytes."""

    def __init__(self, adapter: bytes | None = None) -> None:
        """Take the content hash of the adapter, if one is active."""
        self._adapter = adapter

    def one(self, hashes: Sequence[bytes], index: int) -> bytes:
        """Give the key of a block; PARTIAL where it has no hash."""
        if index >= len(hashes):
            return PARTIAL
        key = bytes(hashes[index])
        if len(key) != KEY_BYTES:
            key = hashlib.sha256(key).digest()
        return with_adapter(key, self._adapter) if self._adapter is not None else key

    def joined(self, hashes: Sequence[bytes]) -> bytes:
        """Give all keys, one after the other."""
        if self._adapter is None and (not hashes or len(hashes[0]) == KEY_BYTES):
            return b"".join(hashes)
        return b"".join(self.one(hashes, i) for i in range(len(hashes)))
