"""KV events: what vLLM publishes is what the connector has."""

from types import SimpleNamespace

from kvport_agent.link import State
from kvport_agent.messages import message
from kvport_vllm.events import CLEARED, REMOVED, STORED, EventApi, Events
from kvport_vllm.keys import Keys
from kvport_vllm.scheduler import SchedulerSide
from kvport_vllm.tracking import Completion


def salt_of(request, first, _end):
    """What vLLM says that a block depends on: a salt only at the beginning."""
    salt = getattr(request, "cache_salt", None)
    return (salt,) if salt and first == 0 else None


class Told:
    """An EventSource, as the agent passes it on, and vLLM's index of what it was told."""

    def __init__(self, most=100):
        api = EventApi(lambda **e: ("stored", e), lambda **e: ("removed", e), lambda h: b"public " + h, salt_of)
        self.events, self.index = Events(4, api, most), {}

    def completion(self, first, end, tag=1, adapter=None, keys=None):
        r = SimpleNamespace(block_hashes=[bytes([tag, i]) * 16 for i in range(end)], all_token_ids=list(range(100)), lora_request=adapter)
        return Completion(SimpleNamespace(request=r, keys=keys or Keys()), first, end, [list(range(first, end))])

    def report(self, *events, gap=False):
        blocks = message("AgentBlocks")(gap=gap)
        for kind, keys, medium, *scope in events:
            blocks.events.add(kind=kind, keys=b"".join(keys), medium=medium, **({"scope": scope[0]} if scope else {}))
        self.events.report(blocks)
        return self.take()

    def take(self):
        taken = self.events.take()
        for kind, e in taken:
            have = self.index.setdefault(e["medium"], set())
            if kind == "stored":
                assert not have & set(e["block_hashes"])
                assert len(e["token_ids"]) == 4 * len(e["block_hashes"]) == 4 * len(set(e["block_hashes"]))
                have |= set(e["block_hashes"])
            else:
                assert have >= set(e["block_hashes"]), "what was never there is removed"
                have -= set(e["block_hashes"])
        return taken


def test_events_of_a_connector_that_tells_nothing():
    t = Told(most=6)
    done = t.completion(1, 5)
    t.events.offered(done)
    assert t.take() == []
    t.events.saved(done, {3})
    (_, one), (_, two) = t.take()
    assert one["block_hashes"] == [b"public " + bytes([1, i]) * 16 for i in (1, 2)] and one["token_ids"] == list(range(4, 12))
    assert one["parent_block_hash"] == b"public " + bytes([1, 0]) * 16 and one["medium"] == "kvport" and one["lora_id"] is None
    assert two["block_hashes"] == [b"public " + bytes([1, 4]) * 16] and two["parent_block_hash"] == b"public " + bytes([1, 3]) * 16
    t.events.saved(done, set())  # once is enough
    ((_, three),) = t.take()
    assert three["block_hashes"] == [b"public " + bytes([1, 3]) * 16]
    t.events.offered(t.completion(0, 4, tag=2))  # there is no room to remember two of the others
    assert sum(len(e["block_hashes"]) for kind, e in t.take() if kind == "removed") == 2
    t.events.agent_lost()
    t.take()
    assert t.index == {"kvport": set()}


def test_events_of_a_connector_that_tells():
    t = Told()
    assert t.report(gap=True) == []
    adapter = SimpleNamespace(adapter_id=5, lora_name="fine")
    plain, tuned = t.completion(0, 3), t.completion(0, 2, 2, adapter, Keys(b"c" * 32))
    names = [plain.tracked.keys.one(plain.tracked.request.block_hashes, i) for i in range(3)]
    theirs = [tuned.tracked.keys.one(tuned.tracked.request.block_hashes, i) for i in range(2)]
    assert t.report((STORED, names, "memory")) == []  # nothing is known of them
    t.events.offered(plain)
    t.events.offered(tuned)
    t.events.saved(plain, set())
    assert t.take() == []  # a save that is over says less than the connector
    got = t.report((STORED, [*names, *theirs], "memory"), (STORED, names[:1], "disk"), (REMOVED, names[2:], "memory"))
    assert [(k, e["medium"], len(e["block_hashes"])) for k, e in got] == [
        ("stored", "CPU", 3), ("stored", "CPU", 2), ("stored", "STORAGE", 1), ("removed", "CPU", 1)]  # fmt: skip
    assert got[1][1]["lora_name"] == "fine" and got[1][1]["lora_id"] == 5
    assert got[1][1]["block_hashes"] == [b"public " + h for h in tuned.tracked.request.block_hashes]  # not the adapter's keys
    t.report(gap=True)
    assert t.index == {"CPU": set(), "STORAGE": set()}
    t.report((STORED, names, "elsewhere"), (CLEARED, [], "elsewhere"))
    assert t.index["elsewhere"] == set()


def test_events_say_the_locality():
    t = Told()
    done = t.completion(0, 2)
    names = [done.tracked.keys.one(done.tracked.request.block_hashes, i) for i in range(2)]
    t.events.offered(done)
    got = t.report((STORED, names, "remote", 3), (STORED, names, "memory", 2), (REMOVED, names, "remote", 3))
    assert [(k, e["medium"], e["locality"]) for k, e in got] == [
        ("stored", "STORAGE", "REMOTE"), ("stored", "CPU", "LOCAL"), ("removed", "STORAGE", "REMOTE")]  # fmt: skip
    t = Told()  # of a connector that tells nothing nobody knows it
    t.events.offered(done)
    t.events.saved(done, set())
    ((_, one),) = t.take()
    assert (one["medium"], one["locality"]) == ("kvport", None)


def test_events_name_the_salt():
    t = Told()
    done = t.completion(0, 2)
    done.tracked.request.cache_salt = "s"
    t.events.offered(done)
    t.events.saved(done, set())
    ((_, one),) = t.take()
    assert one["extra_keys"] == [("s",), None]  # as with vLLM's own event: without it, readers take the block for one of every client


def test_what_was_lost_at_the_start_is_not_forgotten_later():
    api = EventApi(lambda **e: e, lambda **e: e, lambda h: h, salt_of)
    gap = [message("AgentBlocks")(gap=True)]
    link = SimpleNamespace(lost=2, state=State.UP, life=7, poll=lambda: [gap.pop()] if gap else [])
    side = SchedulerSide(link, 4, 1, None, Events(4, api))
    side.begin()  # after an agent that ended while it was connected to
    side.poll()
    assert side.events._told
    link.lost = 3
    side.poll()
    assert not side.events._told


def test_events_switched_off():
    e = Events(4, None)
    e.offered(Told().completion(0, 2))
    e.report(message("AgentBlocks")(gap=True))
    assert e.take() == [] and not e.wanted


def test_places_of_a_block_are_bounded():
    t = Told()
    done = t.completion(0, 1)
    t.events.offered(done)
    name = [done.tracked.keys.one(done.tracked.request.block_hashes, 0)]
    assert [e["medium"] for _, e in t.report((STORED, name, "GPU"))] == ["kvport"]  # only vLLM speaks of its own cache
    got = [t.report((STORED, name, f"place {i}")) for i in range(20)]
    assert sum(map(len, got)) == 7
    t.report(gap=True)
    assert not any(t.index.values())
