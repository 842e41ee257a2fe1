"""Wrong backends for SGLang, each with one fault. The number is that of the rule that it breaks, see sglang_engine."""

import dataclasses
import threading
import time
from collections.abc import Callable

from kvport_sglang import backend, client, fingerprint, pool


@dataclasses.dataclass
class Wrong:
    number: int
    name: str
    plant: Callable
    shm: bool = True


def member(owner, name, wrap):
    """Plant a fault in a member: wrap gets what was there."""

    def plant(patch):
        patch.setattr(owner, name, wrap(getattr(owner, name)))

    return plant


Backend = backend.KvportHiCache


def every_key(real):
    """Exists counts all pages that are stored, and not the leading ones."""
    return lambda self, keys: sum(real(self, [k]) for k in keys)


def one_more(real):
    return lambda self, keys: min(real(self, keys) + 1, len(keys))


def moves(change):
    """Change a put or get: change gets the real one, self, and its arguments."""

    def wrap(real):
        return lambda self, kind, keys, region, offsets, seconds: change(
            lambda k, r, o, s: real(self, kind, k, r, o, s), kind, keys, region, offsets, seconds
        )

    return wrap


def always_right(go, kind, keys, region, offsets, seconds):
    go(keys, region, offsets, seconds)
    return [backend.DONE] * len(keys)


def first_for_all(go, kind, keys, region, offsets, seconds):
    results = go(keys, region, offsets, seconds)
    return [results[0]] * len(results)


def sorted_keys(go, kind, keys, region, offsets, seconds):
    return go(sorted(keys) if kind == "get" else keys, region, offsets, seconds)


def other_parts(go, kind, keys, region, offsets, seconds):
    n = len(offsets) // len(keys)
    if kind == "get":
        offsets = [o for i in range(len(keys)) for o in reversed(offsets[i * n : (i + 1) * n])]
    return go(keys, region, offsets, seconds)


def next_page(go, kind, keys, region, offsets, seconds):
    n = len(offsets) // len(keys)
    return go(keys, region, offsets[n:] + offsets[:n] if kind == "get" else offsets, seconds)


def short_keys(real):
    return lambda name: bytes([1 + real(name)[0] % 2]) + bytes(31)


def later_puts(patch):
    """Set returns before the pool was read; everything else waits for what is still under way."""
    real_move, real_exists, running = Backend._move, Backend._exists, []

    def late(*args):
        time.sleep(0.05)
        real_move(*args)

    def settle():
        while running:
            running.pop().join()

    def move(self, kind, keys, region, offsets, seconds):
        if kind == "get":
            settle()
            return real_move(self, kind, keys, region, offsets, seconds)
        running.append(threading.Thread(target=late, args=(self, kind, keys, region, offsets, seconds)))
        running[-1].start()
        return [backend.DONE] * len(keys)

    def exists(self, keys):
        settle()
        return real_exists(self, keys)

    patch.setattr(Backend, "_move", move)
    patch.setattr(Backend, "_exists", exists)


def puts_once(real):
    seen = set()

    def move(self, kind, keys, region, offsets, seconds):
        if kind == "put" and seen.issuperset(keys):
            return [backend.DONE] * len(keys)
        results = real(self, kind, keys, region, offsets, seconds)
        if kind == "put":
            seen.update(keys)
        return results

    return move


def nothing(real):
    return lambda *args, **kwargs: None


def raises(real):
    return lambda self, hook, call, default: call()


def for_ever(kinds):
    """Wait for an answer without a deadline, of the agent's either."""

    def wrap(real):
        def call(self, deadline, stuck, **fields):
            (name, ask), *_ = fields.items()
            if name in kinds:
                ask.deadline_ms = 0
                return real(self, 3600.0, stuck, **fields)
            return real(self, deadline, stuck, **fields)

        return call

    return wrap


def not_fenced(real):
    """Let a get go whose agent may still write."""
    return lambda self, deadline, stuck, **fields: real(self, deadline, False, **fields)


def copies_all(real):
    def move(self, kind, keys, region, offsets, seconds):
        results = real(self, kind, keys, region, offsets, seconds)
        return [backend.DONE] * len(results) if kind == "get" else results

    return move


def without(field):
    """Leave a part out of the text from which the shape is made."""

    def wrap(real):
        def geometry(p, zero_copy):
            g = real(p, zero_copy)
            text = "; ".join(part for part in g.text.split("; ") if not part.startswith(field))
            return dataclasses.replace(g, layout="", text=text)

        return geometry

    return wrap


def no_ranks(real):
    return lambda storage: ""


def no_weights(real):
    return lambda storage, cache: bytes(31) + b"x"


PLAYED = [
    Wrong(1, "exists counts what comes after a hole", member(Backend, "_exists", every_key)),
    Wrong(1, "exists counts one page too many", member(Backend, "_exists", one_more)),
    Wrong(2, "a get is right whatever the result", member(Backend, "_move", moves(always_right))),
    Wrong(2, "the first page speaks for all", member(Backend, "_move", moves(first_for_all))),
    Wrong(2, "pages in the order of their keys", member(Backend, "_move", moves(sorted_keys))),
    Wrong(2, "parts of a page swapped", member(Backend, "_move", moves(other_parts))),
    Wrong(2, "each page in its neighbour's place", member(Backend, "_move", moves(next_page))),
    Wrong(2, "keys are cut", member(backend, "key_of", short_keys)),
    Wrong(2, "the pool is read after set has returned", later_puts),
    Wrong(2, "copies what was not right", member(Backend, "_move", copies_all), shm=False),
    Wrong(3, "get gives nothing", member(Backend, "batch_get_v1", nothing)),
    Wrong(3, "set gives nothing", member(Backend, "batch_set_v1", nothing)),
    Wrong(7, "what was put once is never put again", member(Backend, "_move", puts_once)),
]

APART = [
    Wrong(2, "no layout in the fingerprint", member(pool, "geometry", without("layout"))),
    Wrong(2, "no dtype in the fingerprint", member(pool, "geometry", without("dtype"))),
    Wrong(2, "no ranks in the fingerprint", member(fingerprint, "rank", no_ranks)),
    Wrong(2, "no weights in the fingerprint", member(fingerprint, "model", no_weights)),
]

STUCK = [
    Wrong(5, "exists has no deadline", member(client.Client, "call", for_ever(["pages_exists"]))),
    Wrong(5, "get has no deadline", member(client.Client, "call", for_ever(["pages_get"]))),
    Wrong(5, "set has no deadline", member(client.Client, "call", for_ever(["pages_put"]))),
]

FENCE = [Wrong(4, "an agent that is given up is not ended", member(client.Client, "call", not_fenced))]

BUG = [Wrong(6, "exceptions pass", member(Backend, "_safe", raises))]

ALL = [*PLAYED, *APART, *STUCK, *FENCE, *BUG]
