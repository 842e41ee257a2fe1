"""Recorded calls of a real vLLM, played through the real connector, agent and plugin."""

import hashlib
import time

import fakes
import golden
import pytest
from engine import BLOCK_TOKENS, Engine, request

PLAYED = {
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
}
LIMIT = 20.0  # seconds for one thing that must happen


def key(short):
    return hashlib.sha256(short.encode()).digest()


class Player:
    """Calls the connector as the trace did, and checks what vLLM would not forgive."""

    def __init__(self, log, engine):
        self.engine = engine
        self.chains = golden.Chains(log, BLOCK_TOKENS).lists
        self.requests, self.answers, self.computed, self.loading = {}, {}, {}, {}
        self.reported, self.local = set(), set()  # loads that have ended; requests that the trace loads and we compute
        self.denied = set()
        self.output = None
        self.seen = dict.fromkeys(("lookups", "loads", "verified", "failed", "waits", "none", "stored"), 0)

    def play(self, log):
        for c in log:
            if c["call"] == "get_num_new_matched_tokens" and c["ret"][0]:
                drain(self.engine)  # what the recorded connector offered, it had saved by then
            if c["call"] in PLAYED:
                getattr(self, c["call"])(c.get("args"))

    # -- what the trace calls

    def on_new_request(self, args):
        r = request(args["id"], [key(h) for h in self.chains.get(args["id"], [])][: args["hashes"]], args["tokens"])
        self.requests[args["id"]] = r
        self.engine.scheduler.on_new_request(r)

    def view(self, args):
        r = self.requests[args["id"]]
        hashes = [key(h) for h in self.chains.get(args["id"], [])][: args["hashes"]]
        r.block_hashes[:] = hashes
        r.num_tokens = args["tokens"]
        return r

    def get_num_new_matched_tokens(self, args):
        r, computed = self.view(args["req"]), args["num_computed_tokens"]
        deadline = time.monotonic() + LIMIT
        while True:
            tokens, async_ = self.engine.scheduler.get_num_new_matched_tokens(r, computed)
            self.seen["lookups"] += 1
            if tokens is not None:
                break
            assert async_ is False and time.monotonic() < deadline
            self.seen["none"] += 1
            time.sleep(0.002)
            self.engine.step()
        assert tokens >= 0 and computed + tokens <= r.num_tokens  # 11
        assert async_ is (tokens > 0)  # 13; every load is asynchronous
        if r.request_id in self.denied:
            assert tokens == 0  # 45
        self.answers[r.request_id] = (computed, tokens)

    def update_state_after_alloc(self, args):
        r, wanted = self.view(args["req"]), args["num_external_tokens"]
        table = args["block_ids"][0]
        self.engine.tables[r.request_id] = table
        computed, offered = self.answers.get(r.request_id, (0, 0))
        external = min(wanted, offered)
        if wanted and not external:
            self.local.add(r.request_id)
        blocks = fakes.KVCacheBlocks(get_block_ids=lambda: (table,))
        if external:
            first = computed // BLOCK_TOKENS
            mine = table[first : first + external // BLOCK_TOKENS]
            self.wait_unpinned(mine)
            self.loading[r.request_id] = (first, mine)
            self.seen["loads"] += 1
        self.engine.scheduler.update_state_after_alloc(r, blocks, external)

    def build_connector_meta(self, args):
        for n in args["new"]:
            self.engine.tables[n["id"]] = list(n["blocks"][0])
        for n in args["cached"]:
            new = (n["new_blocks"] or [[]])[0]
            old = self.engine.tables[n["id"]]
            self.engine.tables[n["id"]] = list(new) if n["resumed"] and new else old + list(new)
        new = [(n["id"], n["computed"]) for n in args["new"]]
        cached = [(n["id"], n["computed"]) for n in args["cached"]]
        writes = []
        for r, computed in new + cached:
            end = computed + args["scheduled"].get(r, 0)
            # What a load of the trace brought and ours did not is there as if we had computed it.
            first = 0 if r in self.local else computed // BLOCK_TOKENS
            self.local.discard(r)
            for i in range(first, end // BLOCK_TOKENS):
                writes.append((self.engine.tables[r][i], self.chains[r][i], r, i))
            self.computed[r] = end
        touched = {self.engine.tables[r][i] for r, c in new + cached for i in range(c // BLOCK_TOKENS, len(self.engine.tables[r]))}
        self.wait_unpinned(touched)
        self.output = self.engine.step(
            new, cached, args["scheduled"], args["preempted"] or (), lambda: [self.engine.write(b, h) for b, h, _, _ in writes]
        )

    def update_connector_output(self, args):
        out = self.output or self.engine.results()
        self.output = None
        wanted = set(args["finished_recving"] or ()) & set(self.loading)
        deadline = time.monotonic() + LIMIT
        while not wanted <= (self.reported | set(out.finished_recving)):
            assert time.monotonic() < deadline, "a load does not end"
            time.sleep(0.001)
            self.take(out, args, wanted)
            out = self.engine.results()
        self.take(out, args, wanted)
        self.stored()

    def take(self, out, args, wanted):
        for r in out.finished_recving:
            assert r in self.loading and r not in self.reported  # 33
            self.reported.add(r)
        if args is not None and wanted & set(out.finished_recving):
            out.invalid_block_ids = set(out.invalid_block_ids) | set(args["invalid_block_ids"] or ())
        for r in out.finished_recving:
            first, mine = self.loading.pop(r)
            self.reported.discard(r)
            bad = set(out.invalid_block_ids) & set(mine)
            self.seen["failed"] += bool(bad)
            if mine and mine[0] in bad:
                self.denied.add(r)
            for i, block in enumerate(mine, first):
                if block not in bad:
                    assert self.engine.holds(block, self.chains[r][i]), f"block {i} of {r} holds something else"
                    self.seen["verified"] += 1
        for r in self.requests.values():  # tokens that this step sampled
            r.num_tokens = max(r.num_tokens, self.computed.get(r.request_id, 0) + 1)
            r.block_hashes[:] = [key(h) for h in self.chains.get(r.request_id, [])]
        self.engine.scheduler.update_connector_output(out)

    def request_finished(self, args):
        r = self.view(args["req"])
        r.status = fakes.RequestStatus[args["req"]["status"]]
        r.num_computed_tokens = args["req"]["computed"]
        assert self.engine.scheduler.request_finished_all_groups(r, (args["block_ids"],)) == (False, None)
        del self.requests[r.request_id]

    # -- what vLLM would do between them

    def wait_unpinned(self, blocks):
        """vLLM would not have given these blocks away: they are pinned in its pool."""
        deadline = time.monotonic() + LIMIT
        while any(self.engine.pool.blocks[b].ref_cnt for b in blocks):
            self.seen["waits"] += 1
            assert time.monotonic() < deadline, "a pin is never dropped"
            pending = self.engine.scheduler.has_pending_push_work()  # 54: or nobody would read the event
            assert pending or not any(self.engine.pool.blocks[b].ref_cnt for b in blocks)
            time.sleep(0.001)

    def stored(self):
        for e in self.engine.scheduler.take_events():
            assert len(e.token_ids) == len(e.block_hashes) * BLOCK_TOKENS == len(e.block_hashes) * e.block_size  # 56
            self.seen["stored"] += len(e.block_hashes)


def drain(engine):
    deadline = time.monotonic() + LIMIT
    while engine.scheduler.has_pending_push_work():
        assert time.monotonic() < deadline, "the engine never goes idle"
        engine.scheduler.update_connector_output(engine.step())
        time.sleep(0.001)


@pytest.mark.parametrize("name", ["async", "serve"])
def test_replay(name, tmp_path, binaries, monkeypatch):
    monkeypatch.setenv("KVPORT_BIN", str(binaries / "kvport"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    log = golden.calls(name)
    engine = Engine(tmp_path / "store", engine=name)
    player = Player(log, engine)
    player.play(log)
    drain(engine)
    deadline = time.monotonic() + LIMIT
    files = sum(1 for p in (tmp_path / "store").glob("?/?/*") if p.is_file())
    while player.seen["stored"] < files and time.monotonic() < deadline:
        engine.scheduler.has_pending_push_work()  # reads what the agent has said
        player.stored()
    assert engine.faults() == {}
    assert engine.pool.pinned == 0 and engine.pool.touched == engine.pool.freed > 0
    assert player.requests == {} or set(player.requests) == set(engine.scheduler.scheduler.requests)
    # The trace has 4 loads more where it fails and the recorded connector offers the same blocks again.
    want = {"async": (2, 27, 0), "serve": (8, 9, 6)}[name]
    assert (player.seen["loads"], player.seen["verified"], player.seen["failed"]) == want, dict(player.seen)
    assert player.seen["stored"] == files >= 150
    assert engine.scheduler.reset_cache() is True  # the folder is empty now, and vLLM is told
    (gone,) = engine.scheduler.take_events()
    assert isinstance(gone, fakes.BlockRemoved) and len(gone.block_hashes) == player.seen["stored"] and gone.medium == "STORAGE"
    engine.close()
    print(name, player.seen)
