"""vLLM as the tests see it: classes with the recorded members and nothing else.

What the connector reads of an object is there only if the recording has it, so that a test fails where
a new vLLM would.
"""

import dataclasses
import enum
import json
import pathlib
import sys
import types

RECORDED = pathlib.Path(__file__).parent / "recorded" / "vllm_0_32.json"


def recorded(path=RECORDED):
    return json.loads(path.read_text(encoding="utf-8"))["classes"]


API = recorded()


class Recorded:
    """An object with some of the recorded fields of a class; anything else is an error."""

    of = ""

    def __init__(self, **values):
        known = set(API[self.of]["fields"]) | set(API[self.of]["members"])
        for name, value in values.items():
            assert name in known, f"{self.of} of vLLM has no {name}"
            object.__setattr__(self, name, value)

    def __getattr__(self, name):
        known = set(API[self.of]["fields"]) | set(API[self.of]["members"])
        assert name in known or name.startswith("__"), f"{self.of} of vLLM has no {name}"
        raise AttributeError(name)


def stub(name):
    return type(name, (Recorded,), {"of": name})


Request = stub("Request")
SchedulerOutput = stub("SchedulerOutput")
CachedRequestData = stub("CachedRequestData")
NewRequestData = stub("NewRequestData")
KVConnectorOutput = stub("KVConnectorOutput")
KVCacheConfig = stub("KVCacheConfig")
KVCacheGroupSpec = stub("KVCacheGroupSpec")
KVCacheTensor = stub("KVCacheTensor")
KVCacheBlocks = stub("KVCacheBlocks")
ParallelConfig = stub("ParallelConfig")
CacheConfig = stub("CacheConfig")
KVTransferConfig = stub("KVTransferConfig")
BlockStored = stub("BlockStored")
BlockRemoved = stub("BlockRemoved")
LoRARequest = stub("LoRARequest")
RequestStatus = enum.Enum("RequestStatus", API["RequestStatus"]["fields"])


def spec_class(name):
    mro = [b for b in API[name]["bases"] if b != "ABC"]
    base = object
    for parent in reversed(mro):
        base = type(parent, (base,), {}) if base is not object else type(parent, (), {})

    def init(self, **values):
        for key, value in values.items():
            assert key in API[name]["fields"] or key in API[name]["members"], f"{name} has no {key}"
            setattr(self, key, value)

    return type(name, (base,), {"__init__": init})


FullAttentionSpec = spec_class("FullAttentionSpec")
SlidingWindowSpec = spec_class("SlidingWindowSpec")
MambaSpec = spec_class("MambaSpec")


@dataclasses.dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False


class BlockPool:
    """Counts references as vLLM's pool does; a block that is freed once too often is an error."""

    def __init__(self, n):
        self.blocks = [Block(i) for i in range(n)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.touched = self.freed = 0
        self.cached = set()  # hashes of blocks that vLLM would find
        self.evicted = set()

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        return [self.null_block for _ in kv_cache_group_ids] if block_hash in self.cached else None

    def touch(self, blocks):
        for b in blocks:
            b.ref_cnt += 1
            self.touched += 1

    def free_blocks(self, ordered_blocks):
        for b in ordered_blocks:
            assert b.ref_cnt > 0, f"block {b.block_id} is freed once too often"
            b.ref_cnt -= 1
            self.freed += 1

    def evict_blocks(self, block_ids):
        self.evicted |= block_ids

    @property
    def pinned(self):
        return sum(b.ref_cnt for b in self.blocks)


class BlockState:
    def __init__(self, tables):
        self.tables = tables

    def get_block_ids(self, req_id):
        return self.tables.get(req_id)


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorBase:
    """Does what vLLM's base class does; signatures are checked in test_api."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._vllm_config, self._kv_transfer_config = vllm_config, vllm_config.kv_transfer_config
        self._kv_cache_config, self._role = kv_cache_config, role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None


class KVConnectorStats:
    def __init__(self, data=None):
        self.data = data or {}


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._labelnames, self.per_engine_labelvalues = labelnames, per_engine_labelvalues


@dataclasses.dataclass
class KVConnectorTransferResults:
    finished_sending: set = dataclasses.field(default_factory=set)
    finished_recving: set = dataclasses.field(default_factory=set)
    failed_recving: set = dataclasses.field(default_factory=set)


class Metric:
    """A metric of prometheus_client. What all of them show is in shown, by name and labels."""

    shown = {}
    registered = set()

    def __init__(self, name, documentation, labelnames, buckets=(), registry=registered, multiprocess_mode=""):
        assert documentation and (type(self).__name__ == "Counter") == name.endswith("_total")
        if registry is not None and name in registry:
            raise ValueError("Duplicated timeseries")
        (registry if registry is not None else set()).add(name)
        self.name, self.names = name, labelnames

    def labels(self, *values):
        key = self.name, tuple(zip(self.names, map(str, values), strict=True))

        def add(n):
            self.shown[key] = self.shown.get(key, 0) + n

        return types.SimpleNamespace(inc=add, observe=add, set=lambda n: self.shown.update({key: n}))


def install():
    """Put the modules that the connector imports in place."""
    empty = lambda name: type(name, (), {})
    base = {
        "KVConnectorBase_V1": KVConnectorBase,
        "SupportsHMA": empty("SupportsHMA"),
        "KVConnectorMetadata": empty("KVConnectorMetadata"),
        "KVConnectorWorkerMetadata": empty("KVConnectorWorkerMetadata"),
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorRole": KVConnectorRole,
    }
    module("vllm.distributed.kv_transfer.kv_connector.v1.base", **base)
    module(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        KVConnectorStats=KVConnectorStats,
        KVConnectorPromMetrics=KVConnectorPromMetrics,
    )
    module("vllm.distributed.kv_events", BlockStored=BlockStored, BlockRemoved=BlockRemoved)
    module(
        "vllm.v1.core.kv_cache_utils",
        maybe_convert_block_hash=lambda h: h,
        generate_block_hash_extra_keys=lambda _request, _first, _end, image: (None, image),
        to_event_extra_keys=list,
    )
    module("prometheus_client", **{kind: type(kind, (Metric,), {}) for kind in ("Counter", "Gauge", "Histogram")})


def module(path, **names):
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[name])
    for name, value in names.items():
        setattr(sys.modules[path], name, value)
