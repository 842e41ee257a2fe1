"""kvport as a storage backend of SGLang's hierarchical cache: any kvport plugin that stores, SGLang unpatched.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "kvport", "module_path": "kvport_sglang", "class_name": "KvportHiCache",
  "interface_v1": 1, "allocator": "shm", "kv_transfer_config": {...}}'
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvportHiCache"]


def __getattr__(name: str) -> Any:
    if name != "KvportHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .backend import KvportHiCache

    return KvportHiCache
