"""SGLang's storage backend. Nothing here raises once an engine runs, and nothing takes longer than its deadline.

Calls come from several threads of SGLang at once, some twice, in any order. close is called where the backend is
detached, and not where SGLang ends.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache import hicache_storage as _hicache  # type: ignore[import-not-found,unused-ignore]

from kvport_agent.content import ContentCache, digest
from kvport_agent.errors import ConfigError, KvportError, UnsupportedError
from kvport_agent.guard import Faults
from kvport_agent.messages import message
from kvport_agent.spawn import Spawner

from . import config, fingerprint, loaded, weights
from . import pool as pool_
from .bounce import NUMBER, Bounce
from .client import Client
from .prom import page_of
from .stats import Numbers, for_sglang

log = logging.getLogger("sglang.kvport")

_HiCacheStorage: Any = _hicache.HiCacheStorage

HASHES = "sglang/sha256"
POOL = 0  # the number of the pool's region
DONE, FAILED, LATE, MEMORY = 1, 2, 3, 4
_RESULTS = {DONE: "done", FAILED: "failed", LATE: "late", MEMORY: "memory"}
_KEY_BYTES = 32
# What one message holds: offsets of a put or get, and keys of a question.
_MOST_NUMBERS, _MOST_KEYS = 1 << 19, 1 << 16


def key_of(name: str) -> bytes:
    """Make 32 bytes of a key of SGLang, which is a SHA-256 in hex."""
    try:
        raw = bytes.fromhex(name)
    except ValueError:
        raw = b""
    return raw if len(raw) == _KEY_BYTES and any(raw) else hashlib.sha256(b"kvport/sglang-key/1" + name.encode()).digest()


def flat_key_of(name: str) -> bytes:
    """Make the key of a page that comes as a tensor: its bytes may be in another order than at its addresses."""
    return hashlib.sha256(b"kvport/sglang-flat/1" + key_of(name)).digest()


def kept_in(namespace: bytes, key: bytes) -> bytes:
    """Make the key of a page in a namespace; the empty one leaves it as it is."""
    return hashlib.sha256(b"kvport/sglang-namespace/1" + namespace + key).digest() if namespace else key


class KvportHiCache(_HiCacheStorage):  # type: ignore[misc]
    """Pages of one rank, in whatever the plugin keeps them in."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Check the config. The agent is started when the pool is known."""
        self._storage = storage_config
        self._config = config.parse(getattr(storage_config, "extra_config", None), fingerprint.process(storage_config))
        said = config.check(self._config)
        fingerprint.rank(storage_config)  # raises if it cannot be served
        self._model = fingerprint.model(storage_config, ContentCache())
        if loaded.FILES.changed():  # asked when they have been hashed: that may take minutes, too
            why = "or files that go with them were changed on disk since they were loaded, if only in owner or mode"
            self._model = digest([self._model, fingerprint.unknown(why)])
        self.faults = Faults(log)
        self.numbers = Numbers()
        self._page = page_of(storage_config)
        self._client: Client | None = None
        self._pool: Any = None
        self._pages: Any = None
        self._shared: pool_.Shared | None = None
        self._bounce: Bounce | None = None
        self._cleared = b""
        weights.WEIGHTS.matter = True
        for doubt in self._config.doubts:
            log.warning("kvport: kvport_sglang.%s", doubt)
        if said.scope == "engine" and getattr(storage_config, "is_mla_model", False) and getattr(storage_config, "tp_size", 1) > 1:
            log.warning(
                "kvport: nothing will be found: rank 0 stores the pages of a model with MLA for all ranks, and no other process "
                "sees what this connector stores; use one whose store is shared"
            )
        if not weights.WEIGHTS.watched:
            log.warning(
                "kvport: SGLang does not show when it loads or changes its weights: never change those of this engine, or their files, "
                "while it runs, or pages of the old ones would be found (is kvport left out of SGLANG_PLUGINS?)"
            )

    # -- the start

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool, and start the agent. Raises what a user must see."""
        super().register_mem_pool_host(mem_pool_host)
        if self._client is not None:
            if mem_pool_host is not self._pool:
                raise UnsupportedError("SGLang has made another pool: kvport serves the first one only")
            return
        self._pool = mem_pool_host
        try:
            self._begin(mem_pool_host)
        except BaseException:
            self.close()
            raise

    def _begin(self, pool: Any) -> None:
        zero_copy = self._config.zero_copy
        self._pages = pool_.geometry(pool, zero_copy)
        self._shared = pool_.lies_in(pool, pool_.shared(pool), self._pages) if zero_copy else None
        room = self._room()
        # Also where the pool is shared, SGLang may give tensors.
        bounce = self._bounce = Bounce(self._pages.lengths, min(room, 8) if self._shared is not None else room)
        assert bounce.memfd is not None
        client = self._client = Client(self._spawner(), self._attach(room), self.numbers.take_state, self.numbers.agents_lost)
        if self._shared is not None:
            client.share(POOL, self._shared.fd, self._shared.size)
        client.share(NUMBER, bounce.memfd.fd, bounce.memfd.size)
        self._say(room)
        try:
            client.start()
        except KvportError as err:
            if "attach_pages.pages:" in str(err):  # more memory than the agent may take
                raise ConfigError(f"kvport_sglang.memory_bytes: is {self._config.memory_bytes}: {err}") from err
            raise

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take the pool once more; refuse other kinds of pool."""
        kind = str(getattr(host_pool_name, "value", host_pool_name))
        if kind != "kv":
            self.close()  # where it is attached to a running engine, SGLang keeps a backend that has raised here
            raise UnsupportedError(f"the model keeps state in a pool of kind {kind}: kvport serves models with a KV cache only")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _room(self) -> int:
        size = sum(self._pages.lengths)
        room = self._config.memory_bytes // size
        if room < 2:
            raise ConfigError(f"kvport_sglang.memory_bytes: is {self._config.memory_bytes}, want at least two pages of {size} bytes")
        return int(min(room, 4096, max(2, _MOST_NUMBERS // len(self._pages.lengths))))

    def _spawner(self) -> Spawner:
        # A name of its own: another process may have the same config, also its engine_id, and would find our agent busy for ever.
        return config.spawner(self._config, f"{self._config.engine}/{uuid.uuid4().hex}")

    def _attach(self, room: int) -> Any:
        attach = message("AgentAttachPages")(version=1, engine=self._config.engine, hashes=HASHES, pages=room)
        attach.model = self._model
        attach.shape = fingerprint.shape(self._pages, self._storage)
        attach.shape_text = fingerprint.shape_text(self._pages, self._storage)
        attach.page_tokens = self._pages.page_tokens
        attach.lengths.extend(self._pages.lengths)
        return attach

    def _say(self, room: int) -> None:
        how = "the agent reads and writes the pool itself"
        if self._shared is None and self._config.zero_copy:
            how = 'pages are copied through memory of our own, since the pool is no memfd ("allocator": "shm" makes it one)'
        elif self._shared is None:
            how = 'pages are copied through memory of our own, since SGLang gives tensors ("interface_v1": 1 gives addresses)'
        level = logging.INFO if self._shared is not None else logging.WARNING
        log.log(level, "kvport: %s; %d pages on their way; %s", how, room, fingerprint.shape_text(self._pages, self._storage))

    # -- calls with addresses

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Count the leading pages that are stored; 0 if that is not known in time."""
        return int(self._safe("batch_exists", lambda: self._asked(keys), 0))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the pool; a page that is not known to be right is False, and its memory as it was."""
        return list(self._safe("batch_get_v1", lambda: self._v1("get", keys, host_indices), [False] * len(keys)))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the pool. The pool is not read any more afterwards."""
        return list(self._safe("batch_set_v1", lambda: self._v1("put", keys, host_indices), [False] * len(keys)))

    def _v1(self, kind: str, keys: list[str], rows: Any) -> list[bool]:
        if not keys:
            return []
        lengths = self._pages.lengths
        parts = pool_.parts_of(self._pool, len(keys), rows, lengths)
        namespace = self._namespace()
        if namespace is None:
            return [False] * len(keys)
        raw = [kept_in(namespace, key_of(k)) for k in keys]
        if self._shared is None:
            n = len(lengths)
            pages = [(parts[i * n : (i + 1) * n], lengths) for i in range(len(keys))]
            return self._believed(kind, namespace, self._copied(kind, raw, pages))
        where = self._shared.offset
        offsets = [where(address, lengths[i % len(lengths)]) for i, address in enumerate(parts)]
        end = time.monotonic() + self._seconds(kind)
        most = max(1, _MOST_NUMBERS // len(lengths))
        results: list[int] = []
        for at in range(0, len(raw), most):
            some = slice(at * len(lengths), (at + most) * len(lengths))
            results += self._move(kind, raw[at : at + most], POOL, offsets[some], max(0.001, end - time.monotonic()))
        return self._believed(kind, namespace, [r == DONE for r in results])

    # -- calls with tensors

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load pages into tensors and give these; None for a page that is not known to be right."""
        targets = list(target_locations) if target_locations is not None else [self._blank() for _ in keys]
        right = self._safe("batch_get", lambda: self._flat("get", keys, targets), [False] * len(keys))
        return [t if ok else None for t, ok in zip(targets, right, strict=False)]

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Store pages that are tensors; say whether all are."""
        return all(self._safe("batch_set", lambda: self._flat("put", keys, list(values)), [False]))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one page into a tensor."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page that is a tensor."""
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        """Say whether one page is stored."""
        return self.batch_exists([key]) == 1

    def _blank(self) -> Any:
        return self._pool.get_dummy_flat_data_page()

    def _flat(self, kind: str, keys: list[str], tensors: Sequence[Any]) -> list[bool]:
        if len(keys) != len(tensors):
            raise UnsupportedError(f"{len(keys)} keys and {len(tensors)} tensors")
        size = sum(self._pages.lengths)
        pages = []
        for tensor in tensors:
            n = int(tensor.numel()) * int(tensor.element_size())
            if n != size or not tensor.is_contiguous():
                raise UnsupportedError(f"a tensor of {n} bytes, dense: {tensor.is_contiguous()}; a page has {size} bytes")
            pages.append(([int(tensor.data_ptr())], (size,)))
        namespace = self._namespace()
        if namespace is None:
            return [False] * len(keys)
        raw = [kept_in(namespace, self._flat_key(k)) for k in keys]
        return self._believed(kind, namespace, self._copied(kind, raw, pages))

    def _flat_key(self, name: str) -> bytes:
        return flat_key_of(name) if self._config.zero_copy else key_of(name)

    def _copied(self, kind: str, keys: list[bytes], pages: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[bool]:
        """Move pages through our own memory, as many at a time as it holds."""
        bounce = self._bounce
        if bounce is None:
            return [False] * len(keys)
        end = time.monotonic() + self._seconds(kind)
        right = [False] * len(keys)
        with bounce.places(kind, self._seconds(kind)) as places:
            for at in range(0, len(keys), bounce.half):
                rest = end - time.monotonic()
                if places is None or rest <= 0:
                    self.numbers.add(f"kvport_sglang_{kind}_late_pages_total", len(keys) - at)
                    break
                now = range(at, min(at + bounce.half, len(keys)))
                if kind == "put":
                    for i in now:
                        bounce.copy_in(places[i - at], *pages[i])
                offsets = [o for i in now for o in bounce.offsets(places[i - at])]
                results = self._move(kind, [keys[i] for i in now], NUMBER, offsets, rest)
                for i, result in zip(now, results, strict=True):
                    right[i] = result == DONE
                    if kind == "get" and right[i]:
                        bounce.copy_out(places[i - at], *pages[i])
                self.numbers.add("kvport_sglang_copied_bytes_total", sum(self._pages.lengths) * len(now))
        return right

    # -- both

    def _seconds(self, kind: str) -> float:
        return self._config.get_seconds if kind == "get" else self._config.put_seconds

    def _namespace(self) -> bytes | None:
        """Give the namespace of this engine's pages; None: its weights are changing, and there are none."""
        now = weights.WEIGHTS.namespace
        return None if now is None else now + self._cleared

    def _believed(self, kind: str, namespace: bytes, right: list[bool]) -> list[bool]:
        """Believe no get amid which the weights changed: what came is of the old ones."""
        return right if kind == "put" or self._namespace() == namespace else [False] * len(right)

    def _asked(self, names: list[str]) -> int:
        namespace = self._namespace()
        return 0 if namespace is None else self._exists([kept_in(namespace, key_of(n)) for n in names])

    def _exists(self, keys: list[bytes]) -> int:
        client = self._client
        if not keys or client is None:
            return 0
        seconds = self._config.exists_seconds
        keys = keys[:_MOST_KEYS]
        ask = message("AgentPagesExists")(keys=b"".join(keys), deadline_ms=max(1, int(seconds * 1000)))
        answer = client.call(seconds, False, pages_exists=ask)
        if answer is None or answer.WhichOneof("result") != "pages_found":
            self.numbers.add("kvport_sglang_exists_unanswered_total")
            return 0
        if answer.pages_found.late:
            self.numbers.add("kvport_sglang_exists_late_total")
        return min(int(answer.pages_found.pages), len(keys))

    def _move(self, kind: str, keys: list[bytes], region: int, offsets: list[int], seconds: float) -> list[int]:
        """Have pages put or got; give the result of each. Once this returns nobody touches the memory for it."""
        began = time.monotonic()
        name = "AgentPagesGet" if kind == "get" else "AgentPagesPut"
        ask = message(name)(keys=b"".join(keys), region=region, offsets=offsets, deadline_ms=max(1, int(seconds * 1000)))
        client = self._client
        answer = client.call(seconds, True, **{f"pages_{kind}": ask}) if client is not None else None
        results = list(answer.pages_done.results) if answer is not None and answer.WhichOneof("result") == "pages_done" else []
        if len(results) != len(keys):
            self.numbers.add(f"kvport_sglang_{kind}_unanswered_pages_total", len(keys))
            return [FAILED] * len(keys)
        for result, text in _RESULTS.items():
            if n := results.count(result):
                self.numbers.add(f"kvport_sglang_{kind}_{text}_pages_total", n)
        if n := results.count(DONE):
            self.numbers.moved(kind, n, n * sum(self._pages.lengths), time.monotonic() - began)
        return results

    def _safe(self, hook: str, call: Callable[[], Any], default: Any) -> Any:
        try:
            return call()
        except Exception:
            self.faults.add(hook)
            self.numbers.add("kvport_sglang_faults_total")
            return default

    # -- the rest

    def clear(self) -> None:
        """Find nothing of what was stored so far. It stays stored: other engines may use it."""
        self._cleared = weights.fresh()
        log.warning("kvport: this engine finds no page any more that was stored before now; other engines do: nothing was deleted")

    def get_stats(self) -> Any:
        """Give what was put and got since the last time, as SGLang's metrics take it, and show the numbers beside them."""
        if (page := self._page) is not None:
            self._safe("show", lambda: page.show(self.numbers), None)
        return self._safe("get_stats", lambda: for_sglang(self.numbers.take_moved()), None)

    def close(self) -> None:
        """Leave the agent, and give back memory and descriptors. Where SGLang only ends, the agent sees the end of the process."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
            self.numbers.agent_left()
            if (page := self._page) is not None:  # nobody asks any more
                self._safe("show", lambda: page.show_now(self.numbers), None)
        bounce, self._bounce = self._bounce, None
        if bounce is not None:
            bounce.close()
