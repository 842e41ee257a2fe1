"""Plays recorded calls of a vLLM to the connector, as vLLM made them."""

import collections
import hashlib
import pathlib
import time
import types

import fakes
import golden
from engine import BLOCK_TOKENS, content, request
from judge import Judge

from kvport_vllm.connector import KvportConnector

LIMIT = 60.0  # seconds for one thing that must happen
# Members that the connector does not have: vLLM's own base class answers.
LEFT_TO_VLLM = {
    "get_finished_count", "set_xfer_handshake_metadata", "get_handshake_metadata", "set_host_xfer_buffer_ops", "handle_preemptions",
}  # fmt: skip
# Calls that the engine of the tests makes when it starts, and one that is played with get_finished.
ELSEWHERE = {"__init__", "get_mem_pool_context", "register_kv_caches", "get_block_ids_with_load_errors"}


def key(short):
    return hashlib.sha256(short.encode()).digest()


class Player:
    """Calls the connector as the trace did. Where the connector offers less, the forward pass does what the trace loads.

    An older vLLM has no pool to pin blocks in, does not show its block tables, and asks get_finished. With slow, saves take
    until the engine waits for them.
    """

    def __init__(self, log, engine, store, older=False, slow=False):
        self.engine, self.store, self.older = engine, store, older
        self.log = log
        self.chains = golden.Chains([c for c in log if c["side"] == "sched"], BLOCK_TOKENS).lists
        self.judge = Judge(engine, lambda r: [key(h) for h in self.chains.get(r, [])], slow)
        self.requests, self.answers, self.computed, self.loading = {}, {}, {}, {}
        self.local, self.denied, self.kept, self.running = set(), set(), {}, set()
        self.restore = {}  # by request whose load fails: what mends the files
        self.meta = self.scheduled = None
        self.writes = []
        self.at = 0
        self.played = collections.Counter()
        self.seen = dict.fromkeys(("lookups", "loads", "verified", "failed", "waits", "none", "stored"), 0)

    def play(self):
        self.judge.settle()
        for at, c in enumerate(self.log):
            self.at = at
            name, args = c["call"], c.get("args")
            if name in LEFT_TO_VLLM:
                assert name not in vars(KvportConnector), f"{name} has an answer of ours now: play it"
            elif name not in ELSEWHERE:
                self.play_one(c, name, args)
            self.played[name] += 1
        self.rest()

    def play_one(self, c, name, args):
        if name == "get_num_new_matched_tokens" and c["ret"][0]:
            self.drain()  # what the recorded connector offered, it had saved by then
        if name == "shutdown":
            self.rest()
            return
        getattr(self, name)(args)
        self.judge.held()
        self.judge.settle()

    # -- what the trace calls: requests

    def on_new_request(self, args):
        r = request(args["id"], [key(h) for h in self.chains.get(args["id"], [])][: args["hashes"]], args["tokens"])
        self.requests[args["id"]] = r
        self.engine.scheduler.on_new_request(r)

    def view(self, args):
        r = self.requests[args["id"]]
        r.block_hashes[:] = [key(h) for h in self.chains.get(args["id"], [])][: args["hashes"]]
        r.num_tokens = args["tokens"]
        return r

    def get_num_new_matched_tokens(self, args):
        r, computed = self.view(args["req"]), args["num_computed_tokens"]
        deadline = time.monotonic() + LIMIT
        while (got := self.ask(r, computed))[0] is None:
            assert time.monotonic() < deadline, "a lookup has no answer"
            self.seen["none"] += 1
            self.empty_step()
        if not self.judge.saving:
            again = self.ask(r, computed)
            self.judge.need(10, again == got or again[0] is None, f"{again} tokens for {r.request_id}, and before {got}")
        self.answers[r.request_id] = (computed, got[0])

    def ask(self, r, computed):
        self.judge.allocated.discard(r.request_id)
        self.judge.asked, self.judge.answered = (r.request_id, computed, r.num_tokens), None
        got = self.engine.scheduler.get_num_new_matched_tokens(r, computed)
        self.judge.asked = None
        self.seen["lookups"] += 1
        self.judge.answer(r.request_id, computed, r.num_tokens, got, r.request_id in self.denied)
        self.judge.settle()
        return got

    def update_state_after_alloc(self, args):
        r, wanted = self.view(args["req"]), args["num_external_tokens"]
        table = args["block_ids"][0]
        computed, offered = self.answers.get(r.request_id, (0, 0))
        external = min(wanted, offered)
        if wanted and not external:
            self.local.add(r.request_id)
        if external:
            first = computed // BLOCK_TOKENS
            mine = table[first : first + external // BLOCK_TOKENS]
            self.wait_free(mine)
            self.loading[r.request_id] = (first, mine)
            self.judge.wanted[r.request_id] = (first, mine)
            self.seen["loads"] += 1
            if self.fails(r.request_id):
                self.restore[r.request_id] = self.damage([key(h) for h in self.chains[r.request_id][first : first + len(mine)]])
        self.engine.tables[r.request_id] = table
        self.judge.allocated.add(r.request_id)
        blocks = fakes.KVCacheBlocks(get_block_ids=lambda: (table,))
        self.engine.scheduler.update_state_after_alloc(r, blocks, external)

    def fails(self, id_):
        """Say whether the load that begins now fails in the trace."""
        for c in self.log[self.at :]:
            if c["call"] == "update_connector_output" and id_ in (c["args"]["finished_recving"] or ()):
                return bool(c["args"]["invalid_block_ids"])
        return False

    def damage(self, keys):
        """Change a byte of stored blocks, and give what changes it back; what the connector has removed stays away."""
        begins = [content(k, 0) for k in keys]
        files = {p: p.read_bytes() for p in pathlib.Path(self.store).glob("?/?/*") if p.is_file()}
        paths = [p for p, data in files.items() if any(b in data for b in begins)]
        assert len(paths) == len(keys), f"{len(paths)} files of {len(keys)} blocks"

        def flip():
            for p in paths:
                try:
                    with p.open("r+b") as f:
                        f.seek(p.stat().st_size // 2)
                        byte = f.read(1)[0] ^ 0x10
                        f.seek(-1, 1)
                        f.write(bytes([byte]))
                except FileNotFoundError:
                    continue

        flip()
        return flip

    def request_finished(self, args):
        r = self.view(args["req"])
        r.status = fakes.RequestStatus[args["req"]["status"]]
        r.num_computed_tokens = args["req"]["computed"]
        self.judge.ended[r.request_id] = args["req"]["computed"]
        delay, params = self.engine.scheduler.request_finished_all_groups(r, (args["block_ids"],))
        assert params is None and (self.older or not delay)
        self.judge.finished(r.request_id, delay)
        if delay:
            self.kept[r.request_id] = set(args["block_ids"])
        del self.requests[r.request_id]
        self.running.discard(r.request_id)

    # -- what the trace calls: steps

    def build_connector_meta(self, args):
        scheduled = dict(args["scheduled"])
        for n in args["new"] + args["cached"]:
            self.compute_instead(n, scheduled)
        new = [(n["id"], n["computed"]) for n in args["new"]]
        cached = [(n["id"], n["computed"]) for n in args["cached"]]
        tables = {n["id"]: list(n["blocks"][0]) for n in args["new"]}
        for n in args["cached"]:
            blocks = (n["new_blocks"] or [[]])[0]
            tables[n["id"]] = list(blocks) if n["resumed"] and blocks else self.engine.tables[n["id"]] + list(blocks)
        self.wait_free({tables[r][i] for r, n in new + cached for i in range(n // BLOCK_TOKENS, len(tables[r]))})
        self.engine.tables.update(tables)
        for r, computed in new + cached:
            end = computed + scheduled.get(r, 0)
            self.writes += [(tables[r][i], key(self.chains[r][i])) for i in range(computed // BLOCK_TOKENS, end // BLOCK_TOKENS)]
            self.computed[r] = end
        self.running |= {r for r, _ in new + cached}
        self.running -= set(args["preempted"] or ())
        self.build(
            fakes.SchedulerOutput(
                scheduled_new_reqs=[fakes.NewRequestData(req_id=r, block_ids=[tables[r]], num_computed_tokens=n) for r, n in new],
                scheduled_cached_reqs=self.cached(args["cached"]),
                num_scheduled_tokens=scheduled,
                preempted_req_ids=set(args["preempted"] or ()),
                kv_connector_block_state=None if self.older else fakes.BlockState({r: [t] for r, t in self.engine.tables.items()}),
            )
        )

    def compute_instead(self, n, scheduled):
        """Let a step compute what a load of the trace brought and ours did not."""
        if n["id"] in self.local:
            self.local.discard(n["id"])
            from_ = self.answers[n["id"]][0]
            scheduled[n["id"]] += n["computed"] - from_
            n["computed"] = from_

    def cached(self, of):
        fields = {
            "req_ids": [n["id"] for n in of],
            "num_computed_tokens": [n["computed"] for n in of],
            "new_block_ids": [n["new_blocks"] for n in of],
        }
        if self.older:
            return types.SimpleNamespace(**fields, resumed_from_preemption=[n["resumed"] for n in of])
        return fakes.CachedRequestData(**fields, resumed_req_ids={n["id"] for n in of if n["resumed"]})

    def build(self, output):
        self.scheduled = output
        self.meta = self.engine.scheduler.build_connector_meta(output)
        self.judge.built(self.meta, output.preempted_req_ids)
        self.judge.settle()

    def bind_connector_metadata(self, _):
        self.engine.worker.bind_connector_metadata(self.meta)

    def start_load_kv(self, _):
        self.engine.worker.start_load_kv(None)

    def wait_for_layer_load(self, args):
        self.engine.worker.wait_for_layer_load(args["layer"])

    def save_kv_layer(self, args):
        self.engine.worker.save_kv_layer(args["layer"], None, None)

    def wait_for_save(self, _):
        writes, self.writes = self.writes, []
        for block, k in writes:
            self.engine.write(block, k)
        self.engine.worker.wait_for_save()

    def get_finished(self, _):
        worker = self.engine.worker
        if self.older:
            sent, received = worker.get_finished(set())
            failed = set()
        else:
            got = worker.get_transfer_results(set())
            sent, received, failed = got.finished_sending, got.finished_recving, got.failed_recving
        invalid = worker.get_block_ids_with_load_errors()
        self.judge.reported(received or (), invalid, failed, self.running)
        self.judge.sending(sent or (), self.kept)
        self.judge.settle()
        self.output = fakes.KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=failed,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )

    def clear_connector_metadata(self, _):
        self.engine.worker.clear_connector_metadata()

    def update_connector_output(self, args):
        wanted = set(args["finished_recving"] or ()) & set(self.loading)
        self.over()
        deadline = time.monotonic() + LIMIT
        while wanted & set(self.loading):
            assert time.monotonic() < deadline, "a load does not end"
            self.empty_step()
        self.stored()

    def over(self):
        """Take what a step's worker said, as vLLM's scheduler does."""
        out = self.output
        for r in out.finished_recving or ():
            self.load_over(r, set(out.invalid_block_ids))
        for r in out.finished_sending or ():
            del self.kept[r]
        for r in self.requests.values():  # tokens that this step sampled
            r.num_tokens = max(r.num_tokens, self.computed.get(r.request_id, 0) + 1)
            r.block_hashes[:] = [key(h) for h in self.chains.get(r.request_id, [])]
        self.engine.scheduler.update_connector_output(out)
        self.judge.settle()

    def load_over(self, r, invalid):
        first, mine = self.loading.pop(r)
        if r in self.restore:
            self.restore.pop(r)()
        bad = invalid & set(mine)
        self.seen["failed"] += bool(bad)
        if mine[0] in bad:
            self.denied.add(r)
        for i, block in enumerate(mine, first):
            if block not in bad:
                self.judge.need(63, self.engine.holds(block, key(self.chains[r][i])), f"block {i} of {r} holds something else")
                self.seen["verified"] += 1

    # -- what vLLM would do between them

    def empty_step(self):
        """Run a step that computes nothing."""
        self.build(
            fakes.SchedulerOutput(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=self.cached([]),
                num_scheduled_tokens={},
                preempted_req_ids=set(),
                kv_connector_block_state=None if self.older else fakes.BlockState({}),
            )
        )
        for call in (self.bind_connector_metadata, self.start_load_kv, self.wait_for_save, self.get_finished):
            call(None)
        self.clear_connector_metadata(None)
        self.over()

    def wait_free(self, blocks):
        """Wait as vLLM would: it gives no block away that is pinned in its pool, or kept for an ended request."""

        def taken():
            kept = set().union(*self.kept.values())
            return any(b in kept or self.engine.pool.blocks[b].ref_cnt for b in blocks)

        deadline = time.monotonic() + LIMIT
        while taken():
            self.seen["waits"] += 1
            assert time.monotonic() < deadline, "a block is never free"
            self.come_to_rest()

    def come_to_rest(self):
        """Step once; where no save is under way any more nothing may be pending."""
        self.judge.release()
        quiet = not self.judge.saving
        self.empty_step()
        if quiet:
            self.empty_step()  # an older vLLM hears of freed blocks with the next metadata
        if quiet and not self.judge.saving and not self.loading:
            self.judge.rest(self.kept)
            self.judge.settle()

    def drain(self):
        deadline = time.monotonic() + LIMIT
        while self.engine.scheduler.has_pending_push_work() or self.loading:
            assert time.monotonic() < deadline, "the engine never goes idle"
            self.come_to_rest()

    def rest(self):
        self.drain()
        self.empty_step()
        self.judge.rest(self.kept)
        self.judge.settle()

    def stored(self):
        for e in self.engine.scheduler.take_events():
            assert len(e.token_ids) == len(e.block_hashes) * BLOCK_TOKENS == len(e.block_hashes) * e.block_size  # 56
            self.seen["stored"] += len(e.block_hashes)
