"""Wrong connectors, each with one fault. The number is that of the invariant that it breaks."""

import ctypes
import dataclasses
from collections.abc import Callable

import engine

from kvport_agent.messages import SIDE_SCHEDULER
from kvport_vllm import memory, setup
from kvport_vllm.connector import KvportConnector
from kvport_vllm.keys import Keys
from kvport_vllm.pins import Delayed, Pins
from kvport_vllm.saving import Saving
from kvport_vllm.scheduler import SchedulerSide
from kvport_vllm.worker import WorkerSide


@dataclasses.dataclass
class Wrong:
    number: int
    name: str
    plant: Callable
    trace: str = "async"
    slow: bool = False  # it shows while a request that has ended is being saved
    older: bool = False  # it shows where vLLM has no pool to pin in and shows no tables
    refused: str = ""  # what the agent answers to its attach; empty: it is taken in, and breaks the rule


def around(owner, name, wrap, static=False):
    """Plant a fault in a member: wrap gets what was there."""

    def plant(patch):
        made = wrap(getattr(owner, name))
        patch.setattr(owner, name, staticmethod(made) if static else made)

    return plant


# -- start


def other_engine(patch):
    real = setup.message

    def made(name):
        def attach(**fields):
            if fields.get("side") == SIDE_SCHEDULER:
                fields["engine"] = "other"
            return real(name)(**fields)

        return attach if name == "AgentAttach" else real(name)

    patch.setattr(setup, "message", made)


def moved(shift):
    def segments(real):
        return lambda *args: [dataclasses.replace(s, offset=shift(i, s)) for i, s in enumerate(real(*args))]

    return around(memory, "segments_of", segments)


START = [
    Wrong(2, "the two sides name two engines", other_engine, refused="both must have the same engine_id"),
    Wrong(4, "layers overlap", moved(lambda i, s: 0), refused="of group 0 overlap"),
    Wrong(4, "a layer lies beyond the storage", moved(lambda i, s: s.offset + i * 4096)),
]

# -- lookups


def answers(change):
    """Change an answer that is known: change gets request, computed and tokens."""

    def match(real):
        def wrong(self, request, computed):
            tokens, asynchronous = real(self, request, computed)
            return (tokens, asynchronous) if tokens is None else change(request, computed, tokens)

        return wrong

    return around(SchedulerSide, "match", match)


def fickle():
    asked = []

    def change(request, computed, tokens):
        asked.append(request)
        tokens -= 32 if tokens and len(asked) % 2 else 0
        return tokens, tokens > 0

    return answers(change)


def deaf(real):
    def ask(self, tracked, question, now):
        real(self, tracked, question, now)
        return None, False

    return ask


def half_a_block(real):
    def question(self, tracked, computed):
        return real(self, tracked, max(0, computed - 7))

    return question


def stubborn(real):
    offered = {}

    def match(self, request, computed):
        got = real(self, request, computed)
        if got[0] is None:
            return got
        offered[request.request_id] = got if got[0] else offered.get(request.request_id, got)
        return offered[request.request_id]

    return match


LOOKUPS = [
    Wrong(10, "another answer to the same question", fickle()),
    Wrong(11, "negative tokens", answers(lambda r, n, t: (t or -32, t > 0))),
    Wrong(11, "more tokens than the prompt has", answers(lambda r, n, t: (r.num_tokens - n + 1 if t else 0, t > 0))),
    Wrong(11, "the agent is asked from half a block", around(SchedulerSide, "_query", half_a_block)),
    Wrong(12, "answers of the agent are dropped", around(SchedulerSide, "_ask", deaf)),
    Wrong(13, "asynchronous nothing", answers(lambda r, n, t: (t, True))),
    Wrong(16, "the whole prompt, within its step", answers(lambda r, n, t: (r.num_tokens - n if t else 0, False))),
    Wrong(16, "the whole prompt", answers(lambda r, n, t: (r.num_tokens - n if t else 0, t > 0))),
    Wrong(45, "an offer after a load that left nothing", around(SchedulerSide, "match", stubborn), trace="serve"),
]

# -- loads


def without_tokens(real):
    def alloc(self, request, blocks, external):
        real(self, request, blocks, external)
        if external == 0:
            self.scheduler.allocated(request, blocks.get_block_ids(), 32)

    return alloc


def admitted_twice(real):
    def allocated(self, request, tables, external):
        real(self, request, tables, external)
        self._step.admitted.append(self._step.admitted[-1])

    return allocated


def at_the_offer(real):
    def match(self, request, computed):
        tokens, asynchronous = real(self, request, computed)
        if tokens:
            self.allocated(request, ([],), tokens)
        return tokens, asynchronous

    return match


def unheard(real):
    def build(self, output):
        meta = real(self, output)
        meta.loads = []
        return meta

    return build


LOADS = [
    Wrong(18, "a load of no external token", around(KvportConnector, "update_state_after_alloc", without_tokens)),
    Wrong(19, "a load is begun twice", around(SchedulerSide, "allocated", admitted_twice)),
    Wrong(19, "a load is never begun", around(SchedulerSide, "allocated", lambda real: lambda *args: None)),
    Wrong(
        20,
        "a load into the wrong blocks",
        around(SchedulerSide, "allocated", lambda real: lambda self, r, tables, n: real(self, r, [t[::-1] for t in tables], n)),
    ),
    Wrong(21, "a load begins with the offer", around(SchedulerSide, "match", at_the_offer)),
    Wrong(38, "the worker does not learn about a load", around(SchedulerSide, "build", unheard)),
]

# -- steps


def nothing_for_empty_steps(real):
    def build(self, output):
        meta = real(self, output)
        return meta if output.num_scheduled_tokens else None

    return build


def too_early(real):
    def build(self, output):
        meta = real(self, output)
        if meta.ack:
            self._dirty |= self.saving.computed(meta.ack, self._step)
            self.flush()
        return meta

    return build


def pins_end_with_the_offer(real):
    def move(self, old, new, keep=None):
        real(self, old, new, keep)
        self.drop(new)

    return move


STEPS = [
    Wrong(24, "an empty step makes no metadata", around(SchedulerSide, "build", nothing_for_empty_steps)),
    Wrong(25, "blocks of a resumed request are appended to its old table", around(
        Saving, "_grow", lambda real: lambda tracked, new, _: real(tracked, new, False), True), older=True),
    Wrong(29, "blocks are offered before they are computed", around(SchedulerSide, "build", too_early)),
    Wrong(32, "blocks are free while they are being saved", around(Pins, "move", pins_end_with_the_offer)),
    Wrong(55, "one key for all blocks", around(Keys, "one", lambda real: lambda self, hashes, index: real(self, hashes, 0))),
]  # fmt: skip

# -- reports


def results(change):
    """Change what the worker reports: change gets the worker's side, sent, received and failed."""
    return around(WorkerSide, "results", lambda real: lambda self: change(self, *real(self)))


def before_the_end(real):
    def results(self):
        received = {p.load.request for p in self._pending.values()}
        self._pending.clear()
        return set(), received, set()

    return results


def sent_twice():
    before = set()

    def change(side, sent, received, failed):
        again = sent | before
        before.clear()
        before.update(sent)
        return again, received, failed

    return results(change)


def one_call_late(real):
    late = []

    def take(self):
        late.append(real(self))
        return late.pop(0) if len(late) > 1 else set()

    return take


def while_it_runs(patch):
    running = set()

    def build(real):
        def wrong(self, output):
            running.update(r.req_id for r in output.scheduled_new_reqs)
            return real(self, output)

        return wrong

    around(SchedulerSide, "build", build)(patch)
    results(lambda side, sent, received, failed: (sent, received | running, failed))(patch)


REPORTS = [
    Wrong(33, "a request that nobody knows", results(lambda side, sent, received, failed: (sent, received | {"nobody"}, failed))),
    Wrong(33, "freed twice", sent_twice(), older=True, slow=True),
    Wrong(34, "the end of a load is lost", results(lambda side, sent, received, failed: (sent, set(), failed))),
    Wrong(34, "a load is reported before it is over", around(WorkerSide, "results", before_the_end)),
    Wrong(37, "a failed block that no load writes", around(WorkerSide, "take_invalid", lambda real: lambda self: real(self) | {3})),
    Wrong(37, "failed blocks one call after the end of their load", around(WorkerSide, "take_invalid", one_call_late), trace="serve"),
    Wrong(40, "the end of a load of a request that runs", while_it_runs),
]

# -- ends


def ends(change):
    """Change what the agent is told of an end: change gets the step that tells it."""

    def finished(real):
        def wrong(self, request, tables, reason, normal):
            before = len(self._step.ended)
            got = real(self, request, tables, reason, normal)
            if len(self._step.ended) > before:
                change(self._step)
            return got

        return wrong

    return around(SchedulerSide, "finished", finished)


def twice(step):
    step.ended.append(step.ended[-1])


def never(step):
    del step.ended[-1]


def of_nobody(step):
    step.ended.add(request="nobody")


def too_many(step):
    step.ended[-1].tokens += 64


def at_once(real):
    def wait(self, request):
        kept = real(self, request)
        if kept:
            self._over.append(request)
        return kept

    return wait


def mirrored_and_not_copied(patch):
    """Share a copy of the cache, and leave what was loaded there."""

    def out(self, tensor, block, ratio, into):
        into[:] = ctypes.string_at(tensor.address + block * tensor.strides[0], len(into))

    def fail(*_):
        raise OSError("no")

    patch.setattr(engine.Tensors, "copy_out", out, raising=False)
    patch.setattr(memory, "adopted", lambda *args: None)
    patch.setattr(memory, "move", fail)
    patch.setattr(WorkerSide, "_copy_in", lambda self, load, bad: True)


ENDS = [
    Wrong(36, "blocks are freed while they are being saved", around(Delayed, "wait", at_once), older=True, slow=True),
    Wrong(48, "an end is told twice", ends(twice)),
    Wrong(48, "the end of a request that never came", ends(of_nobody)),
    Wrong(48, "an end with tokens that are not computed", ends(too_many)),
    Wrong(
        49, "blocks that are being saved are given away", around(Delayed, "wait", lambda real: lambda self, r: False), older=True, slow=True
    ),
    Wrong(49, "blocks are kept for ever", around(Delayed, "take", lambda real: lambda self: real(self) and []), older=True),
    Wrong(54, "a save never ends", around(Saving, "saved", lambda real: lambda self, event: None)),
    Wrong(54, "an end is never told", ends(never)),
    Wrong(63, "loaded blocks stay in the mirror", mirrored_and_not_copied),
]

ALL = START + LOOKUPS + LOADS + STEPS + REPORTS + ENDS
