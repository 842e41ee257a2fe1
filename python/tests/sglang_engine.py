"""SGLang around the backend: a pool, the calls that SGLang makes, and a judge of every answer.

The rules, by number: 1 exists counts leading pages that are stored, 2 a page that get calls right holds what belongs
to its key, 3 answers have one entry for each key and the right type, 4 memory that no page of a True was loaded to
is as it was, 5 calls end in time, 6 nothing is raised, 7 what is put again is there again.
"""

import concurrent.futures
import gzip
import hashlib
import json
import pathlib
import time

import sglang_fakes as fakes

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = 30.0  # no call takes longer on the busiest machine


class BrokenError(Exception):
    def __init__(self, number, text):
        super().__init__(f"rule {number}: {text}")
        self.number = number


def hold(number, true, text):
    if not true:
        raise BrokenError(number, text)


def key(n, tag=""):
    return hashlib.sha256(f"key {tag} {n}".encode()).hexdigest()


def keys(first, last, tag=""):
    return [key(n, tag) for n in range(first, last + 1)]


def fixtures():
    """All plugins of the repository: name, connector, first setup, and whether it keeps blocks."""
    for path in sorted(HERE.parent.parent.glob("plugins/*/fixture.json")):
        yield path.parent.name, json.loads(path.read_text())


def typical():
    return next(f["connector"] for _, f in fixtures() if f.get("typical") == "store")


def extra(folder, connector=None, inner=None, settings=None, **more):
    """SGLang's --hicache-storage-backend-extra-config, as SGLang gives it to a backend."""
    config = {"kv_connector": connector or typical(), "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "store")} if inner is None else inner
    # A busy machine is no fault, and nobody but the backend ends a call that hangs.
    config["kvport"] = {"heartbeat": {"limit": "5m"}, "deadlines": {"transfer": "5m", "save": "5m", "later": "5m"}}
    own = {"exists_ms": 20_000, "memory_bytes": 8 * 2 * fakes.LAYERS * fakes.TOKENS * fakes.TOKEN_BYTES}
    base = {"backend_name": "kvport", "module_path": "kvport_sglang", "class_name": "KvportHiCache", "interface_v1": 1, "allocator": "shm"}
    return {**base, "kv_transfer_config": config, "kvport_sglang": {**own, **(settings or {})}, **more}


def model(folder, weights=b"weights"):
    path = folder / f"model-{hashlib.sha256(weights).hexdigest()[:8]}"
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    return path


class Engine:
    """One rank of SGLang with the backend."""

    def __init__(self, folder, layout="page_first", shm=True, pool=None, weights=b"weights", storage=None, **config):
        from kvport_sglang import KvportHiCache

        self.pool = pool or fakes.MHATokenToKVPoolHost(layout, shm)
        self.config = fakes.storage_config(extra(folder, **config), model(folder, weights), **(storage or {}))
        self.backend = KvportHiCache(self.config, {})
        self.backend.register_mem_pool_host(self.pool)
        self.backend.register_mem_host_pool_v2(self.pool, fakes.PoolName.KV)
        self.limit = LIMIT
        self.took = 0.0

    def close(self):
        from kvport_sglang.stats import SHIM

        self.backend.close()
        self.pool.close()
        unknown = {k for k in self.numbers() if k.startswith("kvport_sglang_")} - set(SHIM)
        assert not unknown, "counters that are not said what they mean"

    def agent(self):
        """The agent's process, and those of the plugin."""
        fence = self.backend._client._link._fence
        return fence.pids[0], fence.pids[1:]

    def _timed(self, call):
        """Make a call on a thread of its own, as SGLang does."""
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            future = thread.submit(call)
            try:
                out = future.result(self.limit)
            except concurrent.futures.TimeoutError:
                self.backend.close()
                raise BrokenError(5, f"a call takes longer than {self.limit} s") from None
            except Exception as err:
                raise BrokenError(6, f"a call raised {err!r}") from err
        self.took = time.monotonic() - began
        return out

    def exists(self, names):
        n = self._timed(lambda: self.backend.batch_exists(names))
        hold(3, type(n) is int and 0 <= n <= len(names), f"exists of {len(names)} keys gave {n!r}")
        return n

    def get(self, names, pages):
        """Load pages over what belongs to nobody; judge the answer and the memory."""
        before = self.pool.scribble(len(names))
        right = self._timed(lambda: self.backend.batch_get_v1(names, fakes.rows_of(pages)))
        self._judge_list(right, names)
        for name, page, ok in zip(names, pages, right, strict=True):
            hold(2, not ok or self.pool.holds(page, name), f"page {page} does not hold what belongs to {name[:8]}")
        hold(
            4,
            self.pool.spare(before, [p for p, ok in zip(pages, right, strict=True) if ok]),
            "memory of pages that are not right has changed",
        )
        return right

    def set(self, names, pages):
        """Store pages, and use their memory for something else at once."""
        for name, page in zip(names, pages, strict=True):
            self.pool.write(page, name)
        right = self._timed(lambda: self.backend.batch_set_v1(names, fakes.rows_of(pages)))
        self._judge_list(right, names)
        self.pool.scribble(7)
        return right

    @staticmethod
    def _judge_list(right, names):
        fits = isinstance(right, list) and len(right) == len(names) and all(type(r) is bool for r in right)
        hold(3, fits, f"{len(names)} keys gave {right!r}")

    def numbers(self):
        return self.backend.numbers.all()

    def counts(self, name, least):
        """Wait until a counter of the agent, over all labels, has reached a value."""
        deadline = time.monotonic() + LIMIT
        while True:
            n = sum(v for k, v in self.numbers().items() if k.split("{")[0] == name)
            if n >= least:
                return n
            assert time.monotonic() < deadline, f"{name} is {n}, and never {least}: {self.numbers()}"
            time.sleep(0.01)


def recorded(name):
    with gzip.open(HERE / "testdata" / f"sglang_{name}.jsonl.gz", "rt") as f:
        return [json.loads(line) for line in f]


class Player:
    """Plays recorded calls of SGLang to an engine, and knows what must be stored."""

    def __init__(self, engine, tag=""):
        self.engine, self.tag = engine, tag
        self.stored = set()

    def play(self, log):
        for row in log:
            if "method" not in row:
                continue
            names = keys(*row["keys"], self.tag)
            pages = list(range(row["rows"][0] // fakes.TOKENS, (row["rows"][1] + 1) // fakes.TOKENS)) if "rows" in row else None
            getattr(self, row["method"])(names, pages)

    def leading(self, names):
        return next((i for i, n in enumerate(names) if n not in self.stored), len(names))

    def batch_exists(self, names, _pages=None):
        n = self.engine.exists(names)
        hold(1, n == self.leading(names), f"exists gave {n}, {self.leading(names)} leading pages are stored")

    def batch_get_v1(self, names, pages):
        right = self.engine.get(names, pages)
        want = [n in self.stored for n in names]
        hold(2, all(w or not r for r, w in zip(right, want, strict=True)), "a page came that nobody stored")
        hold(7, right == want, f"get gave {right}, stored are {want}")

    def batch_set_v1(self, names, pages):
        right = self.engine.set(names, pages)
        hold(7, all(right), f"set gave {right}")
        self.stored.update(names)
