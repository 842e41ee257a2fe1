"""The two sides of the connector in one process, over memory that is not torch's, as vLLM would hold them."""

import hashlib
import json
import pathlib
import sys
import types

import fakes

from kvport_vllm import memory
from kvport_vllm.connector import KvportConnector
from kvport_vllm.layout import View

BLOCK_TOKENS, LAYERS = 32, 2
LAYER_BYTES = 2048  # of a block


class Tensors:
    def view(self, tensor):
        return tensor

    def on_host(self, tensor):
        return True

    def storage(self, tensor):
        return tensor.address, tensor.shape[0] * LAYER_BYTES


class Adoption:
    def __init__(self, sizes, room):
        (size,) = sizes
        self.memfd = memory.Memfd(size + room)


def torchless():
    """Stand in for the one module that knows torch."""
    sys.modules["kvport_vllm.torchmem"] = types.SimpleNamespace(Adoption=Adoption, TorchTensors=Tensors)


def content(key, layer):
    return hashlib.shake_128(f"{key}/{layer}".encode()).digest(LAYER_BYTES)


def typical_store():
    """The connector that stands for stores."""
    for path in pathlib.Path(__file__).resolve().parents[2].glob("plugins/*/fixture.json"):
        if (fixture := json.loads(path.read_text())).get("typical") == "store":
            return fixture["connector"]
    raise LookupError("no fixture is typical of stores")


class Engine:
    """vLLM, as far as the connector can tell."""

    def __init__(self, store, blocks=66, engine="e", role="kv_both", pool=True, waits=False, **inner):
        torchless()
        self.blocks = blocks
        extra = {"kv_connector": typical_store(), "kv_connector_extra_config": {"shared_storage_path": str(store)}, **inner}
        transfer = fakes.KVTransferConfig(
            engine_id=engine, kv_role=role, kv_load_failure_policy="recompute", kv_connector_extra_config=extra
        )
        self.config = types.SimpleNamespace(
            kv_transfer_config=transfer,
            parallel_config=types.SimpleNamespace(
                rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
            ),
            cache_config=types.SimpleNamespace(prefix_caching_hash_algo="sha256", hash_block_size=32, cache_dtype="auto"),
            model_config=types.SimpleNamespace(model="tests/model", revision="1", dtype="float32", quantization=None, hf_config=None),
            compilation_config=types.SimpleNamespace(static_forward_context={}),
            kv_events_config=types.SimpleNamespace(enable_kv_cache_events=True),
            speculative_config=None,
            scheduler_config=types.SimpleNamespace(async_scheduling=not waits),
        )
        spec = fakes.FullAttentionSpec(block_size=BLOCK_TOKENS, sliding_window=None)
        names = [f"l{i}" for i in range(LAYERS)]
        self.cache = fakes.KVCacheConfig(
            num_blocks=blocks,
            kv_cache_layout="LBHNC",
            needs_kv_cache_zeroing=False,
            kv_cache_groups=[fakes.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)],
            kv_cache_tensors=[fakes.KVCacheTensor(size=blocks * LAYERS * LAYER_BYTES, layers=names)],
        )
        self.worker = KvportConnector(self.config, fakes.KVConnectorRole.WORKER, self.cache)
        context = self.worker.get_mem_pool_context()
        self.memfd = context.memfd
        stride = blocks * LAYER_BYTES
        self.worker.register_kv_caches(
            {n: View(self.memfd.address + i * stride, (blocks, LAYER_BYTES), (LAYER_BYTES, 1), 1) for i, n in enumerate(names)}
        )
        self.scheduler = KvportConnector(self.config, fakes.KVConnectorRole.SCHEDULER, self.cache)
        self.pool = fakes.BlockPool(blocks)
        if pool:
            self.scheduler.bind_gpu_block_pool(self.pool)
        self.tables = {}

    def write(self, block, key):
        """Do what a forward pass does with a full block."""
        for layer in range(LAYERS):
            at = (layer * self.blocks + block) * LAYER_BYTES
            self.memfd.map[at : at + LAYER_BYTES] = content(key, layer)

    def holds(self, block, key):
        out = b"".join(
            self.memfd.map[at : at + LAYER_BYTES] for at in ((layer * self.blocks + block) * LAYER_BYTES for layer in range(LAYERS))
        )
        return out == b"".join(content(key, layer) for layer in range(LAYERS))

    def step(self, new=(), cached=(), scheduled=None, preempted=(), compute=lambda: None):
        """Run one engine step through both sides; give what the worker reported."""
        output = fakes.SchedulerOutput(
            scheduled_new_reqs=[fakes.NewRequestData(req_id=r, block_ids=[self.tables[r]], num_computed_tokens=n) for r, n in new],
            scheduled_cached_reqs=fakes.CachedRequestData(
                req_ids=[r for r, _ in cached],
                num_computed_tokens=[n for _, n in cached],
                resumed_req_ids=set(),
                new_block_ids=[None for _ in cached],
            ),
            num_scheduled_tokens=scheduled or {},
            preempted_req_ids=set(preempted),
            kv_connector_block_state=fakes.BlockState({r: [t] for r, t in self.tables.items()}),
        )
        meta = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(meta)
        compute()
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        return self.results()

    def results(self):
        got = self.worker.get_transfer_results(set())
        out = fakes.KVConnectorOutput(
            finished_sending=got.finished_sending,
            finished_recving=got.finished_recving,
            failed_recving=got.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        return out

    def faults(self):
        return {**self.scheduler.faults.counts, **self.worker.faults.counts}

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


def request(id_, hashes, tokens, **more):
    base = {
        "request_id": id_,
        "block_hashes": list(hashes),
        "num_tokens": tokens,
        "num_computed_tokens": 0,
        "kv_transfer_params": None,
        "lora_request": None,
        "skip_reading_prefix_cache": False,
        "status": fakes.RequestStatus.RUNNING,
        "all_token_ids": range(1 << 20),
    }
    return fakes.Request(**{**base, **more})
