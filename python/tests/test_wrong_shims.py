"""Each wrong connector is refused by the agent, or caught by the rule that it breaks while recorded calls of vLLM are played to it."""

import golden
import pytest
import wrong_shims
from engine import Engine
from judge import BrokenError
from player import Player

from kvport_agent.errors import KvportError


def caught(wrong, here):
    """Play until a rule is broken, and give that rule's number."""
    log = golden.calls(wrong.trace)
    engine = Engine(here / "store", pool=not wrong.older)
    try:
        with pytest.raises(BrokenError) as broken:
            Player(log, engine, here / "store", wrong.older, wrong.slow).play()
    finally:
        engine.close()
    print(f"\n{wrong.name}: {broken.value}")
    return broken.value.number


@pytest.mark.parametrize("wrong", wrong_shims.ALL, ids=lambda w: f"{w.number} {w.name}")
def test_wrong_shim(wrong, here, monkeypatch):
    wrong.plant(monkeypatch)
    if wrong.refused:
        with pytest.raises(KvportError, match=wrong.refused):
            Engine(here / "store", pool=not wrong.older)
        return
    assert caught(wrong, here) == wrong.number


def test_wrong_shims_have_names():
    names = {(w.number, w.name) for w in wrong_shims.ALL}
    assert len(names) == len(wrong_shims.ALL)
    print(f"\n{len(names)} wrong connectors of {len({n for n, _ in names})} invariants")
