"""What the scheduler's side tells the workers, and what they tell back. Pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .vllm_api import KVConnectorMetadata, KVConnectorWorkerMetadata

UNSENT = -1  # step of a load that never gets into a message: it fails


@dataclass
class Load:
    """A load that a step handed to the agent."""

    request: str
    step: int  # id of the Step message; 0: not sent yet, UNSENT: never
    life: int  # of the agent it went to; 0: it went nowhere
    blocks: list[list[int]]  # by group
    now: bool = False  # the step that begins it waits for it
    by_layer: bool = False  # one layer after the other


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One engine step, for the workers."""

    ack: int = 0  # this step completes blocks: answer with this number
    loads: list[Load] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)  # requests whose delayed blocks are free
    completes: list[list[int]] | None = None  # with ack: the blocks, by group, for a mirrored cache
    idle: bool = False  # the engine computes nothing in this step and waits for nothing but loads


@dataclass
class StepDone(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The steps whose completed blocks are true on a worker."""

    acks: set[int]
    waited: dict[str, float] = field(default_factory=dict)  # for loads of this very step: seconds, by request
    early: int = 0  # loads of which a layer was used before their end
    whole: str = ""  # why the worker does not wait layer by layer

    def aggregate(self, other: Any) -> StepDone:
        """Put the answers of two workers together; they ran the same step."""
        waited = {r: max(self.waited.get(r, 0.0), other.waited.get(r, 0.0)) for r in {**self.waited, **other.waited}}
        return StepDone(self.acks | other.acks, waited, max(self.early, other.early), self.whole or other.whole)
