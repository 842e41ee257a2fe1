"""The other end of a test: vLLM's own classes read what kvport publishes, and publish what kvport reads.

python peer.py EVENTS REPLAY THEIRS THEIR_REPLAY: subscribes to EVENTS and publishes at THEIRS. It takes a command a
line: "read N" prints the next N messages, "replay FROM" prints what a replay gives, "publish N" publishes N batches.
"""

import json
import sys

import msgspec
import zmq
from vllm.distributed.kv_events import (
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

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
