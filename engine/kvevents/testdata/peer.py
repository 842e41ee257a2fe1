"""The other end of a test: vLLM's own classes read what kvport publishes, and publish what kvport reads.

They are those of vllm/distributed/kv_events.py. That file is loaded alone, since importing all of vLLM takes a minute.

python peer.py EVENTS REPLAY THEIRS THEIR_REPLAY: subscribes to EVENTS and publishes at THEIRS. It takes a command a
line: "read N" prints the next N messages, "replay FROM" prints what a replay gives, "publish N" publishes N batches.
"""

import importlib.util
import json
import logging
import sys
import types
from pathlib import Path

import msgspec
import zmq


def load():
    """Load the file, with what it imports from the rest of vLLM replaced."""
    [path] = Path(sys.prefix).glob("lib/python*/site-packages/vllm/distributed/kv_events.py")
    imported = {
        "vllm.config.kv_events": {"KVEventsConfig": types.SimpleNamespace},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils.network_utils": {"get_ip": None, "get_tcp_uri": None, "is_valid_ipv6_address": None, "split_zmq_path": None},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    for name, content in imported.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(parts[i - 1]))
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    spec = importlib.util.spec_from_file_location("kv_events", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_events"] = module
    spec.loader.exec_module(module)
    return module


vllm = load()
BlockStored, KVEventBatch, ZmqEventPublisher = vllm.BlockStored, vllm.KVEventBatch, vllm.ZmqEventPublisher

events, replay, theirs, their_replay = sys.argv[1:5]
context = zmq.Context.instance()
subscriber = context.socket(zmq.SUB)
subscriber.connect(events)
subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@")
decoder = msgspec.msgpack.Decoder(type=KVEventBatch)


def shown(value):
    """JSON has no bytes."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [shown(v) for v in value]
    return value


def message(frames):
    topic, seq, payload = frames
    batch = decoder.decode(payload)
    fields = lambda e: {"type": type(e).__name__, **{f: shown(getattr(e, f)) for f in e.__struct_fields__}}
    return {"topic": topic.decode(), "seq": int.from_bytes(seq, "big"), "events": [fields(e) for e in batch.events], "rank": batch.data_parallel_rank}


publisher = None
published = 0
print("ready", flush=True)
for line in sys.stdin:
    command, number = line.split()
    number = int(number)
    answer = []
    if command == "read":
        answer = [message(subscriber.recv_multipart()) for _ in range(number)]
    elif command == "replay":
        asker = context.socket(zmq.DEALER)
        asker.connect(replay)
        asker.send_multipart((b"", number.to_bytes(8, "big")))
        while True:
            frames = asker.recv_multipart()
            assert frames[0] == b"", frames
            if frames[2] == ZmqEventPublisher.END_SEQ:
                break
            answer.append(message(frames[1:]))
        asker.close(linger=0)
    elif command == "publish":
        if publisher is None:
            publisher = ZmqEventPublisher(0, endpoint=theirs, replay_endpoint=their_replay, buffer_steps=100, topic="kv@them")
        for i in range(published, published + number):
            batch = KVEventBatch(
                ts=float(i),
                events=[
                    BlockStored(
                        block_hashes=[i.to_bytes(32, "big")],
                        parent_block_hash=None,
                        token_ids=[i, 5],
                        block_size=2,
                        lora_id=None,
                        medium="GPU",
                        lora_name=None,
                        extra_keys=[None],
                        group_idx=0,
                    )
                ],
            )
            publisher.publish(batch)
        published += number
    print(json.dumps(answer), flush=True)
if publisher is not None:
    publisher.shutdown()
