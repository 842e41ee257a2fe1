"""Recorded calls of a real vLLM, played through the real connector, agent and plugin."""

import time

import fakes
import golden
import pytest
from engine import Engine
from judge import RULES
from player import LIMIT, Player

from kvport_vllm import layout
from kvport_vllm.layout import Group, View


@pytest.mark.parametrize("older", [False, True], ids=["today", "older"])
@pytest.mark.parametrize("name", ["async", "serve"])
def test_replay(name, older, here):
    log = golden.calls(name)
    engine = Engine(here / "store", engine=name, pool=not older)
    player = Player(log, engine, here / "store", older)
    player.play()
    assert sum(player.played.values()) == len(log) == {"async": 832 + 2758, "serve": 999 + 3301}[name]
    deadline = time.monotonic() + LIMIT
    files = sum(1 for p in (here / "store").glob("?/?/*") if p.is_file())
    while player.seen["stored"] < files and time.monotonic() < deadline:
        engine.scheduler.has_pending_push_work()  # reads what the agent has said
        player.stored()
    assert engine.faults() == {}
    if not older:
        assert engine.pool.pinned == 0 and engine.pool.touched == engine.pool.freed > 0
    assert set(player.requests) == set(engine.scheduler.scheduler.requests)
    # The trace has 4 loads more where it fails and the recorded connector offers the same blocks again.
    want = {"async": (2, 27, 0), "serve": (8, 9, 6)}[name]
    assert (player.seen["loads"], player.seen["verified"], player.seen["failed"]) == want, dict(player.seen)
    assert player.seen["stored"] >= files >= 150
    assert engine.scheduler.reset_cache() is True  # the folder is empty now, and vLLM is told
    gone = engine.scheduler.take_events()[-1]
    assert isinstance(gone, fakes.BlockRemoved) and len(gone.block_hashes) == files and gone.medium == "STORAGE"
    engine.close()
    print(f"\n{name}: {len(log)} calls replayed, {player.judge.checks} checks of {len(RULES)} invariants; {player.seen}")


@pytest.mark.parametrize("name", ["async", "serve"])
def test_the_recorded_cache_is_laid_out(name):
    (cache,) = [c["args"] for c in golden.calls(name) if c["call"] == "register_kv_caches"]
    item, step = 4, cache["layer_off"][1]
    shape, strides = tuple(cache["shape"]), tuple(item * s for s in cache["stride"])
    views = {f"l{i}": View(cache["base_ptr"] + i * step * item, shape, strides, item) for i in range(cache["n"])}
    assert [i * step for i in range(3)] == cache["layer_off"] and cache["dtype"] == "torch.float32"
    segments = layout.segments_of([Group(tuple(views), 32)], views, shape[0], lambda address: address - cache["base_ptr"])
    assert [s.offset for s in segments] == [i * step * item for i in range(cache["n"])]
    assert all(s.stride * shape[0] == step * item == s.bytes * shape[0] for s in segments)  # no gap, nothing twice
    assert segments[-1].offset + step * item == cache["storage_bytes"]
