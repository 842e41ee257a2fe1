"""Recorded calls of a real vLLM, and who asked for which block."""

import gzip
import json
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent / "testdata"


SCHEDULER = {
    "__init__", "get_finished_count", "set_xfer_handshake_metadata", "on_new_request", "get_num_new_matched_tokens",
    "update_state_after_alloc", "build_connector_meta", "update_connector_output", "request_finished", "shutdown",
}  # fmt: skip
WORKER = {
    "__init__", "get_mem_pool_context", "register_kv_caches", "set_host_xfer_buffer_ops", "get_handshake_metadata",
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
    "get_finished", "get_block_ids_with_load_errors", "clear_connector_metadata", "shutdown",
}  # fmt: skip


def side(name, suffix, known):
    with gzip.open(FOLDER / f"{name}_{suffix}.jsonl.gz", "rt", encoding="utf-8") as f:
        out = [json.loads(line) for line in f]
    unknown = {c["call"] for c in out} - known
    assert not unknown, f"{name}_{suffix} holds calls that are not known: {sorted(unknown)}"
    return [{**c, "side": suffix} for c in out]


def calls(name):
    """Both sides of one engine in one order, that of cause and effect: their clocks have different beginnings.

    The worker's start comes before the scheduler's, and each step's worker calls behind the call that made the
    step's metadata.
    """
    start, steps, end = [], {}, []
    step = 0
    for c in side(name, "worker", WORKER):
        if c["call"] == "handle_preemptions":
            step = c["args"]["step"]
            assert step not in steps, f"the worker has step {step} twice"
        list_ = end if c["call"] == "shutdown" else steps.setdefault(step, []) if step else start
        list_.append(c)
    out = start
    for c in side(name, "sched", SCHEDULER):
        out.append(c)
        if c["call"] == "build_connector_meta":
            out += steps.pop(c["step"])
    assert not steps, f"the worker has steps that the scheduler has not: {sorted(steps)}"
    return out + end


class Chains:
    """Hashes of each request's full blocks, in order.

    A trace names a hash where a block is saved or loaded; a block from the local cache has the hash of
    whoever filled its slot, and one that was stored already that of the only stored block with its parent.
    """

    def __init__(self, log, block_size):
        self.size = block_size
        self.of = {}
        self.after = {}
        for _ in range(3):  # what is found in one pass helps the next
            self.slots, self.tables, self.filled = {}, {}, {}
            for c in log:
                self.see(c)
        self.lists = {r: [self.of[r][i] for i in range(n)] for r, n in self.filled.items()}

    def see(self, c):
        if c["call"] == "get_num_new_matched_tokens":
            self.filled.setdefault(c["args"]["req"]["id"], 0)
        elif c["call"] == "update_state_after_alloc":
            self.tables[c["args"]["req"]["id"]] = list(c["args"]["block_ids"][0])
        elif c["call"] == "build_connector_meta":
            self.step(c)

    def step(self, c):
        computed = {}
        for n in c["args"]["new"]:
            self.tables[n["id"]], computed[n["id"]] = list(n["blocks"][0]), n["computed"]
        for n in c["args"]["cached"]:
            computed[n["id"]] = n["computed"]
            new = (n["new_blocks"] or [[]])[0]
            self.tables[n["id"]] = list(new) if n["resumed"] and new else self.tables[n["id"]] + list(new)
        for request, blocks, hashes in c["ret"]["loads"]:
            for block, h in zip(blocks, hashes, strict=True):
                self.put(request, self.tables[request].index(block), h)
        for request, block, h in c["ret"]["saves"]:
            self.put(request, self.tables[request].index(block), h)
        for request, n in c["args"]["scheduled"].items():
            self.fill(request, computed[request] // self.size, (computed[request] + n) // self.size)

    def parent(self, request, i):
        return "" if i == 0 else self.of.get(request, {}).get(i - 1, "")

    def put(self, request, i, h):
        self.of.setdefault(request, {})[i] = h
        if i < len(self.tables[request]):
            self.slots[self.tables[request][i]] = h
        parent = self.parent(request, i)
        if i == 0 or parent:
            self.after.setdefault(parent, set()).add(h)

    def fill(self, request, first, end):
        table = self.tables[request]
        for i in range(min(end, len(table))):
            h = self.of.get(request, {}).get(i)
            if not h and i < first:
                h = self.slots.get(table[i])
            next_ = self.after.get(self.parent(request, i), set())
            if not h and (i == 0 or self.parent(request, i)) and len(next_) == 1:
                (h,) = next_
            if h:
                self.put(request, i, h)
            elif i >= first:
                self.slots.pop(table[i], None)
        self.filled[request] = max(self.filled.get(request, 0), end)
