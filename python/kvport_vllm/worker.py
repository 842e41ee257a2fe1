"""A worker's side: loads that a step began are reported once, when nothing can write into their blocks any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvport_agent.link import IDLE_WAIT, LISTEN_EVERY, Link, State
from kvport_agent.messages import LANDED, LAYERS, LOADED

from .memory import Shared
from .meta import Load, StepDone, StepMetadata

log = logging.getLogger("vllm.kvport")

# Beyond the host's own deadlines, in which a transfer is retried and its plugin restarted.
_SLACK = 20.0
_MAX_EARLY = 4096
# A step that waits for its load does so because loads were quick: this one hangs.
_WAIT_AT_MOST = 2.0


@dataclass(slots=True)
class _Pending:
    load: Load
    began: float
    deadline: float
    landed: bool = False  # its bytes are there; whether they are right is being checked
    layers: int = 0  # that are there and right


class WorkerSide:
    """All of the connector that lives beside a rank's model runner. Used by its thread alone."""

    def __init__(self, link: Link, groups: int, transfer: float, per_gib: float) -> None:
        """Take the connection and the host's deadline of a transfer, in seconds."""
        self.link = link
        self.shared: Shared | None = None
        self.block_bytes = 0
        self.layers: dict[str, int] = {}  # number of each layer by its name
        self.unread: set[str] = set()  # layers that this step has not waited for, if it loads any layer by layer
        self._early_reads: set[str] = set()  # requests of whose loads it has used a layer before their end
        self._deaf = ""  # which layers vLLM did not wait for
        self._groups = groups
        self._transfer = transfer
        self._per_gib = per_gib
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._early: dict[tuple[int, str, int], tuple[list[int], float]] = {}  # ends of loads whose step is not here yet
        self._sent: list[str] = []
        self._acks: set[int] = set()
        self._quiet = 0  # steps since the agent was listened to
        self._idle = False  # the step computes nothing
        self._copy_out: Sequence[Sequence[int]] | None = None
        self.invalid: set[int] = set()
        self._received: set[str] = set()
        self._waited: dict[str, float] = {}  # for loads of this very step
        self._spent = 0.0  # of its time, on waiting
        self._by_layer: list[Load] = []  # of this very step
        self._failed: set[str] = set()

    def bind(self, meta: StepMetadata) -> None:
        """Take what the step began."""
        self._idle, self._spent = meta.idle, 0.0
        if meta.ack:
            self._acks.add(meta.ack)
            self._copy_out = meta.completes
        if meta.sent:
            self._sent += meta.sent
        for load in meta.loads:
            blocks = sum(len(ids) for ids in load.blocks)
            limit = 2 * (self._transfer + self._per_gib * blocks * self.block_bytes / (1 << 30)) + _SLACK
            now = time.monotonic()
            self._pending[load.request, load.step] = _Pending(load, now, now + limit)
        self._by_layer = [] if self._whole else [load for load in meta.loads if load.by_layer]
        self.unread = set(self.layers) if self._by_layer else set()

    @property
    def _mirrored(self) -> bool:
        return self.shared is not None and self.shared.mirror is not None

    @property
    def _whole(self) -> str:
        """Say why no load is waited for layer by layer, or nothing."""
        return "the cache is mirrored, and copied when a load is over" if self._mirrored else self._deaf

    def wait_for_loads(self) -> None:
        """Take start_load_kv: wait for the bytes without which the step cannot go on."""
        if self._pending:
            self._wait_while(lambda p: self._mirrored or not (p.landed or p.load in self._by_layer))

    def wait_for_layer(self, name: str) -> None:
        """Take wait_for_layer_load: wait until a layer is verified, or until a load has landed of which no layers are told."""
        if self._pending:
            self._listen()
            number = self.layers.get(name, len(self.layers))
            self._wait_while(lambda p: not p.landed and p.layers <= number)
            self._early_reads.update(p.load.request for p in self._pending.values() if p.load.by_layer and p.layers > number)
        self.unread.discard(name)  # not before: nobody is asked to wait once all are

    def wait_for_verdicts(self) -> None:
        """Wait until it is known whether what this step has computed on is right."""
        if self._pending:
            self._wait_while(lambda _: True)
        if self.unread:
            self._doubt()

    def _doubt(self) -> None:
        """Report the loads of a step as failed that has not waited for all layers: it may have read what had not come."""
        self._deaf, self.unread = f"vLLM did not wait for {', '.join(sorted(self.unread)[:3])}", set()
        for load in self._by_layer:
            self.invalid.update(b for ids in load.blocks for b in ids)

    def _wait_while(self, missing: Callable[[_Pending], bool]) -> None:
        """Wait for what is missing of the loads of this step."""
        if not (mine := self._missing(missing)):
            return
        began = time.monotonic()
        while self._missing(missing):
            self._listen()
            self._check()
            if not self._missing(missing):
                break
            if self.link.state is not State.UP:
                time.sleep(0.001)  # until nobody is left that could write
            elif self._spent + time.monotonic() - began > _WAIT_AT_MOST:
                self.link.lose("a step waits for its load, which takes far longer than others did")
            else:
                self.link.wait(0.05)
        waited = time.monotonic() - began
        self._spent += waited
        for load in mine:
            if not load.by_layer:  # the others say when they are over how long they took
                self._waited[load.request] = self._waited.get(load.request, 0.0) + waited

    def _missing(self, missing: Callable[[_Pending], bool]) -> list[Load]:
        return [p.load for p in self._pending.values() if p.load.now and missing(p)]

    def give_up_loads(self) -> None:
        """Report those loads as failed: something of ours is broken."""
        self.link.lose("waiting for a load has failed")
        for key, pending in list(self._pending.items()):
            if pending.load.now:
                del self._pending[key]
                self._waited[pending.load.request] = 0.0
                self.invalid.update(b for ids in pending.load.blocks for b in ids)
        self._by_layer, self.unread = [], set()

    def forward_over(self) -> None:
        """Take wait_for_save: what the step computed is in the cache, and goes to the mirror if there is one."""
        copies, self._copy_out = self._copy_out, None
        if copies is not None and self.shared is not None and self.shared.mirror is not None:
            self.shared.mirror.save(copies)

    def done(self) -> StepDone | None:
        """Answer build_connector_worker_meta: nothing, for a step that completed no block and waited for none."""
        if not (self._acks or self._waited):
            return None
        acks, self._acks = self._acks, set()
        waited, self._waited = self._waited, {}
        early, self._early_reads = self._early_reads, set()
        return StepDone(acks, waited, len(early), self._whole)

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Give requests whose delayed blocks are free, that were loaded, and whose load failed as a whole."""
        self._quiet += 1
        if self._pending or self._quiet >= LISTEN_EVERY or self.link.state is not State.UP:
            self._quiet = 0
            self._listen()
        if self._pending:
            self._check()
        if self._idle and self._pending and not self._received:
            self._await_load()
        if not (self._sent or self._received):
            return set(), set(), set()
        sent, self._sent = set(self._sent), []
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return sent, received, failed

    def _listen(self) -> None:
        for event in self.link.poll():
            kind = getattr(event, "kind", None)
            if kind == LOADED:
                self._loaded(event)
            elif kind in (LANDED, LAYERS) and (pending := self._pending.get((event.request, event.step))):
                pending.landed |= kind == LANDED
                pending.layers = max(pending.layers, event.layers)

    def _await_load(self) -> None:
        """Wait for the end of a load, as long as an engine without anything to compute may stand still."""
        deadline = time.monotonic() + IDLE_WAIT
        while not self._received and self.link.state is State.UP and (rest := deadline - time.monotonic()) > 0:
            self.link.wait(rest)
            self._listen()

    def _loaded(self, event: Any) -> None:
        pending = self._pending.pop((event.request, event.step), None)
        if pending is not None:
            self._over(pending, list(event.failed), event.took_us / 1e6)
        elif len(self._early) < _MAX_EARLY:
            self._early[self.link.life, event.request, event.step] = list(event.failed), event.took_us / 1e6

    def _over(self, pending: _Pending, bad: list[int], took: float) -> None:
        """Report a load that took so many seconds, once: what is in self survives whatever is raised on the way."""
        load = pending.load
        if not load.now:
            self._received.add(load.request)
        elif load.by_layer:
            # Until now the model has computed as well. An agent that does not say how long the load took is an old one.
            self._waited[load.request] = took or time.monotonic() - pending.began
        if self._mirrored and not self._copy_in(load, set(bad)):
            bad = [b for ids in load.blocks for b in ids]
        if bad:
            log.warning("kvport: %d blocks of request %s could not be loaded", len(bad), load.request)
        if self._groups > 1 and bad:
            self._failed.add(load.request)
        else:
            self.invalid.update(bad)

    def _copy_in(self, load: Load, bad: set[int]) -> bool:
        assert self.shared is not None and self.shared.mirror is not None
        try:
            self.shared.mirror.load([[b for b in ids if b not in bad] for ids in load.blocks])
        except Exception:
            log.exception("kvport: blocks of request %s could not be copied from the mirror", load.request)
            return False
        return True

    def _check(self) -> None:
        """End loads that nobody will report: of an agent that has ended, or stuck for too long."""
        now = time.monotonic()
        if self.link.state is not State.FENCING and any(now > p.deadline for p in self._pending.values()):
            self.link.lose("a load is long past its deadline")
        for key, pending in list(self._pending.items()):
            life = pending.load.life
            early = self._early.pop((life, *key), None)
            if early is not None:
                del self._pending[key]
                self._over(pending, *early)
            elif self._nobody(life, now > pending.deadline):
                del self._pending[key]
                self._fail(pending)
        if not self._pending:
            self._early = {key: end for key, end in self._early.items() if key[0] == self.link.life}

    def _fail(self, pending: _Pending) -> None:
        load = pending.load
        blocks = [b for ids in load.blocks for b in ids]
        if not blocks and not load.now:  # nobody knows which blocks it was for: none of them can be used
            self._failed.add(load.request)
        self._over(pending, blocks, 0.0)

    def _nobody(self, life: int, late: bool) -> bool:
        """Say whether no process is left that could write for a load that went to this life of the agent."""
        if life == 0 or life in self.link.fenced:
            return True
        if self.link.state is State.UP:
            return life != self.link.life  # we are attached to its successor
        return late and self.link.state is not State.FENCING

    def take_invalid(self) -> set[int]:
        """Give the blocks that could not be loaded, once."""
        if not self.invalid:
            return set()
        invalid, self.invalid = self.invalid, set()
        return invalid

    def close(self) -> None:
        """Leave; the memory goes with the process."""
        self.link.close()
        if self.shared is not None:
            self.shared.memfd.close()
