"""Writes recorded/vllm_X_Y.json: the part of an installed vLLM that the connector relies on.

    path/to/venv/bin/python tests/record_api.py

Run once for a new vLLM; the tests then say, without vLLM, what does not fit any more.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import pathlib
import re
import sys

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CLASSES = [
    (BASE, "KVConnectorBase_V1"),
    (BASE, "SupportsHMA"),
    (BASE, "KVConnectorMetadata"),
    (BASE, "KVConnectorWorkerMetadata"),
    (BASE, "KVConnectorTransferResults"),
    (BASE, "KVConnectorRole"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorStats"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics"),
    ("vllm.distributed.kv_events", "BlockStored"),
    ("vllm.distributed.kv_events", "BlockRemoved"),
    ("vllm.v1.request", "Request"),
    ("vllm.v1.request", "RequestStatus"),
    ("vllm.v1.outputs", "KVConnectorOutput"),
    ("vllm.v1.core.sched.output", "SchedulerOutput"),
    ("vllm.v1.core.sched.output", "CachedRequestData"),
    ("vllm.v1.core.sched.output", "NewRequestData"),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"),
    ("vllm.v1.core.block_pool", "BlockPool"),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"),
    ("vllm.v1.kv_cache_interface", "KVCacheTensor"),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec"),
    ("vllm.v1.kv_cache_interface", "MambaSpec"),
    ("vllm.lora.request", "LoRARequest"),
    ("vllm.config", "KVTransferConfig"),
    ("vllm.config", "ParallelConfig"),
    ("vllm.config", "CacheConfig"),
]


def parameters(function):
    return [
        {"name": p.name, "kind": p.kind.name, "required": p.default is inspect.Parameter.empty}
        for p in inspect.signature(function).parameters.values()
    ]


def member(owner, name):
    raw = inspect.getattr_static(owner, name)
    if isinstance(raw, property):
        return {"kind": "property"}
    if isinstance(raw, (classmethod, staticmethod)):
        return {"kind": type(raw).__name__, "parameters": parameters(raw.__func__)}
    if inspect.isfunction(raw):
        return {"kind": "method", "parameters": parameters(raw), "abstract": bool(getattr(raw, "__isabstractmethod__", False))}
    return {"kind": "value"}


def fields(owner):
    names = set()
    if dataclasses.is_dataclass(owner):
        names |= {f.name for f in dataclasses.fields(owner)}
    for base in owner.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
        if base.__module__.startswith("vllm") and "__init__" in vars(base):
            with contextlib.suppress(OSError, TypeError):
                names |= set(re.findall(r"\bself\.([a-z_]\w*)\s*(?::[^=\n]+)?=", inspect.getsource(base.__init__)))
    if hasattr(owner, "__members__"):
        names |= set(owner.__members__)
    return sorted(n for n in names if not n.startswith("__"))


def record(module, name):
    owner = getattr(importlib.import_module(module), name)
    members = {}
    for key in dir(owner):
        if key.startswith("__") and key != "__init__":
            continue
        members[key] = member(owner, key)
    return {
        "module": module,
        "bases": [b.__name__ for b in owner.__mro__[1:] if b.__module__.startswith("vllm")],
        "fields": fields(owner),
        "members": members,
    }


def main():
    version = importlib.metadata.version("vllm").split("+")[0]
    out = {"vllm": version, "classes": {name: record(module, name) for module, name in CLASSES}}
    major, minor = version.split(".")[:2]
    path = pathlib.Path(__file__).parent / "recorded" / f"vllm_{major}_{minor}.json"
    path.write_text(json.dumps(out, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {path.name}: {len(out['classes'])} classes", file=sys.stderr)


if __name__ == "__main__":
    main()
