"""Write golden.json: batches of KV events as vLLM's own classes encode them.

Run it where vLLM 0.32 is installed: python golden.py > golden.json
"""

import json
import sys

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

H = [bytes([i]) * 32 for i in range(4)]


def stored(**more):
    fields = dict(
        block_hashes=H[:2],
        parent_block_hash=None,
        token_ids=[1, 2, 300, 70000, 5, 6, 7, 8],
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    fields.update(more)
    return BlockStored(**fields)


BATCHES = {
    "plain": KVEventBatch(ts=1.5, events=[stored()], data_parallel_rank=0),
    "parent": KVEventBatch(ts=2.0, events=[stored(parent_block_hash=H[3], group_idx=1)], data_parallel_rank=2),
    "numbers": KVEventBatch(
        ts=3.0, events=[stored(block_hashes=[7, 2**64 - 1], parent_block_hash=2**63)], data_parallel_rank=0
    ),
    "negative": KVEventBatch(ts=3.0, events=[stored(block_hashes=[-5, 200])], data_parallel_rank=0),
    "extra": KVEventBatch(
        ts=4.0,
        events=[
            stored(
                lora_id=3,
                lora_name="tuned",
                extra_keys=[("tuned", ("image", 7), "salt"), ("tuned",)],
                group_idx=0,
            )
        ],
        data_parallel_rank=0,
    ),
    "salt": KVEventBatch(ts=4.0, events=[stored(extra_keys=[("salt",), None], group_idx=0)], data_parallel_rank=0),
    "offloaded": KVEventBatch(
        ts=5.0,
        events=[
            stored(
                medium="CPU",
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                kv_cache_spec_sliding_window=None,
                locality="LOCAL",
                ownership="tier",
                session_id="session",
            ),
            stored(block_hashes=H[2:3], token_ids=[], block_size=0, medium="STORAGE"),
        ],
        data_parallel_rank=0,
    ),
    "removed": KVEventBatch(
        ts=6.0,
        events=[
            BlockRemoved(block_hashes=H[:1], medium="GPU", group_idx=0),
            BlockRemoved(block_hashes=H[1:3], medium=None),
            BlockRemoved(block_hashes=[9], medium="STORAGE", group_idx=1, locality="REMOTE", ownership="tier"),
        ],
        data_parallel_rank=0,
    ),
    "cleared": KVEventBatch(ts=7.0, events=[AllBlocksCleared()], data_parallel_rank=0),
    "no rank": KVEventBatch(ts=8.0, events=[AllBlocksCleared()]),
    "empty": KVEventBatch(ts=9.0, events=[], data_parallel_rank=0),
}

encoder = msgspec.msgpack.Encoder()
golden = {name: encoder.encode(batch).hex() for name, batch in BATCHES.items()}
golden["end of a replay"] = ZmqEventPublisher.END_SEQ.hex()
json.dump(golden, sys.stdout, indent=1)
print()
