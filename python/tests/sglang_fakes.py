"""SGLang's hierarchical cache as the tests see it: what a storage backend inherits, a pool in each layout, and tensors."""

import ctypes
import dataclasses
import enum
import hashlib
import mmap
import os
import random
import sys
import types

TOKENS, LAYERS, HEADS, DIM, ITEM = 16, 3, 2, 8, 4
TOKEN_BYTES = HEADS * DIM * ITEM  # of one layer, K or V
PAGES = 64
LAYOUTS = ("page_first", "page_first_direct", "layer_first")


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        if not hasattr(self, "registered_pools"):
            self.registered_pools = {}
        self.registered_pools[host_pool_name] = host_pool


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"


@dataclasses.dataclass
class StorageMetrics:
    prefetch_pgs: list = dataclasses.field(default_factory=list)
    backup_pgs: list = dataclasses.field(default_factory=list)
    prefetch_bandwidth: list = dataclasses.field(default_factory=list)
    backup_bandwidth: list = dataclasses.field(default_factory=list)


def install():
    """Put the modules in place that the backend imports."""
    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.observability", "sglang.srt.plugins"]
    for name in names:
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["sglang.srt.mem_cache.hicache_storage"] = types.SimpleNamespace(HiCacheStorage=HiCacheStorage)
    sys.modules["sglang.srt.mem_cache"].hicache_storage = sys.modules["sglang.srt.mem_cache.hicache_storage"]
    sys.modules["sglang.srt.observability.metrics_collector"] = types.SimpleNamespace(StorageMetrics=StorageMetrics)


class Rows(list):
    """A tensor of row numbers."""

    def tolist(self):
        return list(self)


def rows_of(pages):
    return Rows(p * TOKENS + t for p in pages for t in range(TOKENS))


class Tensor:
    """A flat page."""

    def __init__(self, data):
        self._data = ctypes.create_string_buffer(data, len(data))

    def data_ptr(self):
        return ctypes.addressof(self._data)

    def numel(self):
        return len(self._data) // ITEM

    def element_size(self):
        return ITEM

    def is_contiguous(self):
        return True

    def bytes(self):
        return self._data.raw


def content(key):
    """What belongs to a key, by (K or V, layer, token)."""
    stream = hashlib.shake_128(key.encode()).digest(2 * LAYERS * TOKENS * TOKEN_BYTES)
    cells = [(kv, layer, token) for kv in range(2) for layer in range(LAYERS) for token in range(TOKENS)]
    return {cell: stream[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES] for i, cell in enumerate(cells)}


class MHATokenToKVPoolHost:
    """The pool of a dense model. shm: it lies in a memfd, as SGLang makes it, that cannot be sealed."""

    def __init__(self, layout="page_first", shm=True, dtype="torch.float32", page_size=TOKENS, pages=PAGES, storage_format_tag=None):
        self.storage_format_tag = storage_format_tag
        self.layout, self.dtype, self.page_size = layout, dtype, page_size
        self.size = pages * TOKENS
        self.layer_num, self.head_num, self.head_dim, self.start_layer, self.end_layer = LAYERS, HEADS, DIM, 0, LAYERS
        self.bytes = 2 * LAYERS * self.size * TOKEN_BYTES
        self.allocator = types.SimpleNamespace()
        fd = -1
        if shm:
            fd = os.memfd_create("hicache", os.MFD_CLOEXEC)
            os.ftruncate(fd, self.bytes)
            self.allocator.fd = fd
        self.map = mmap.mmap(fd, self.bytes, mmap.MAP_SHARED)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def cell(self, page, kv, layer, token):
        """Say where a cell lies."""
        half = self.bytes // 2
        if self.layout == "page_first":
            return kv * half + ((page * TOKENS + token) * LAYERS + layer) * TOKEN_BYTES
        if self.layout == "page_first_direct":
            return kv * half + ((page * LAYERS + layer) * TOKENS + token) * TOKEN_BYTES
        return kv * half + (layer * self.size + page * TOKENS + token) * TOKEN_BYTES

    def write(self, page, key):
        for (kv, layer, token), data in content(key).items():
            at = self.cell(page, kv, layer, token)
            self.map[at : at + TOKEN_BYTES] = data

    def holds(self, page, key):
        return all(self.map[at : at + TOKEN_BYTES] == data for cell, data in content(key).items() for at in [self.cell(page, *cell)])

    def scribble(self, seed=0):
        """Fill the pool with what belongs to nobody, and give it."""
        data = random.Random(seed).randbytes(self.bytes)
        self.map[:] = data
        return data

    def spare(self, before, pages):
        """Say whether everything is as it was but some pages."""
        now = bytearray(self.map[:])
        for page in pages:
            for cell in content(""):
                at = self.cell(page, *cell)
                now[at : at + TOKEN_BYTES] = before[at : at + TOKEN_BYTES]
        return bytes(now) == before

    def get_page_buffer_meta(self, indices):
        indices = list(indices)
        assert len(indices) % TOKENS == 0
        pointers, sizes = [], []
        for first in indices[::TOKENS]:
            page = first // TOKENS
            if self.layout == "layer_first":
                spots = [(kv, layer, TOKENS * TOKEN_BYTES) for layer in range(LAYERS) for kv in range(2)]
            else:
                spots = [(kv, 0, LAYERS * TOKENS * TOKEN_BYTES) for kv in range(2)]
            for kv, layer, size in spots:
                pointers.append(self._base + self.cell(page, kv, layer, 0))
                sizes.append(size)
        return pointers, sizes

    def get_dummy_flat_data_page(self):
        return Tensor(bytes(2 * LAYERS * TOKENS * TOKEN_BYTES))

    def close(self):
        if hasattr(self.allocator, "fd"):
            os.close(self.allocator.fd)


def storage_config(extra, model, **more):
    base = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dp_rank": 0,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "should_split_heads": False,
        "tp_lcm_size": None,
        "model_name": str(model),
        "extra_config": extra,
    }
    return types.SimpleNamespace(**{**base, **more})
