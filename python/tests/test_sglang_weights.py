"""Weights that SGLang changes in a running engine: pages of the old ones are never taken for pages of the new ones."""

import functools
import pkgutil
import sys
import types

import pytest
import sglang_engine as rig
import sglang_fakes as fakes

fakes.install()

from kvport_sglang import weights  # noqa: E402

PAGES = list(range(20))
NAMES, MORE = rig.keys(0, 5), rig.keys(10, 15)
UPDATER = weights._UPDATER.rpartition(".")[0]


class Registry:
    """SGLang's registry of hooks, which puts each in place at once."""

    @staticmethod
    def register(target, hook, kind):
        owner, _, name = target.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def wrapped(*args, **kwargs):
            if kind == "before":
                assert hook(*args, **kwargs) is None
            result = plain(*args, **kwargs)
            if kind == "after":
                assert hook(result, *args, **kwargs) is None
            return result

        setattr(owner, name, wrapped)


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's scheduler and what changes its weights, with our hooks in place."""

    class Scheduler:
        idle = True

        def flush_cache(self, empty_cache=True):
            return self.idle

    class SchedulerWeightUpdaterManager:
        def __init__(self):
            self.scheduler, self.amid = Scheduler(), list

        def update(self, flush=True, success=True):
            self.amid()
            if flush:
                self.scheduler.flush_cache()
            return types.SimpleNamespace(success=success)

        update_weights_from_disk = update_weights_from_distributed = update_weights_from_tensor = update_weights_from_ipc = update

        def begin_weight_update(self, success=True):
            return types.SimpleNamespace(success=success)

        def end_weight_update(self):
            return types.SimpleNamespace(success=True)

        def release_memory_occupation(self, request):
            pass

    for path in ("sglang.srt.managers", "sglang.srt.managers.scheduler", UPDATER.rpartition(".")[0], UPDATER):
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    sys.modules["sglang.srt.managers.scheduler"].Scheduler = Scheduler
    sys.modules[UPDATER].SchedulerWeightUpdaterManager = SchedulerWeightUpdaterManager
    monkeypatch.setattr(weights, "WEIGHTS", weights.Weights())
    weights.look()
    assert not weights.WEIGHTS.watched, "nothing is in place"
    weights.register(Registry, types.SimpleNamespace(BEFORE="before", AFTER="after"))
    weights.look()
    assert weights.WEIGHTS.watched
    return SchedulerWeightUpdaterManager()


def off(e):
    """Say whether an engine finds, loads and stores nothing."""
    nothing = e.exists(NAMES) == 0 and not any(e.get(NAMES, PAGES[:6])) and not any(e.set(NAMES, PAGES[:6]))
    blank = e.pool.get_dummy_flat_data_page()
    return nothing and e.backend.batch_get(NAMES[:1], [blank]) == [None] and not e.backend.batch_set(NAMES[:1], [blank])


@pytest.mark.parametrize("source", ["disk", "ipc", "tensor", "distributed"])
def test_weights_change(engine, sglang, monkeypatch, source):
    e = engine()
    assert all(e.set(NAMES, PAGES[:6])) and e.exists(NAMES) == 6
    amid = []
    sglang.amid = lambda: amid.append(off(e))
    update = getattr(sglang, f"update_weights_from_{source}")
    if source in ("disk", "ipc"):
        update()
    else:
        sglang.begin_weight_update()
        assert off(e)
        update()
        assert off(e), "caches may be emptied once for each part of the weights"
        update()
        sglang.end_weight_update()
    assert amid and all(amid)
    assert e.exists(NAMES) == 0 and e.get(NAMES, PAGES[:6]) == [False] * 6
    assert all(e.set(MORE, PAGES[:6])) and e.exists(MORE) == 6 and all(e.get(MORE, PAGES[:6]))
    later = engine()
    assert later.exists(MORE) == 6 and later.exists(NAMES) == 0, "a backend that is attached later is of the same weights"
    monkeypatch.setattr(weights, "WEIGHTS", weights.Weights())
    assert later.exists(MORE) == 0 and later.exists(NAMES) == 6, "an engine with the weights of the start has its own pages, and no others"


def test_caches_that_are_not_emptied(engine, sglang):
    """KV of the old weights is in SGLang's caches, from where it would be stored."""
    e = engine()
    sglang.update_weights_from_disk(flush=False)
    assert off(e)
    sglang.scheduler.idle = False
    sglang.scheduler.flush_cache()
    assert off(e), "SGLang has refused to empty them"
    sglang.scheduler.idle = True
    sglang.scheduler.flush_cache()
    assert all(e.set(NAMES, PAGES[:6])) and e.exists(NAMES) == 6
    sglang.begin_weight_update()
    sglang.scheduler.flush_cache()
    sglang.update_weights_from_tensor(flush=False)
    sglang.end_weight_update()
    assert off(e), "they were emptied before the last change"
    sglang.scheduler.flush_cache()
    assert e.exists(NAMES) == 0 and all(e.set(NAMES, PAGES[:6]))


def test_a_change_that_does_not_begin(engine, sglang):
    e = engine()
    sglang.begin_weight_update(success=False)
    sglang.scheduler.flush_cache()
    assert all(e.set(NAMES, PAGES[:6])), "no session is open"


def test_caches_emptied_without_a_change(engine, sglang):
    e = engine()
    assert all(e.set(NAMES, PAGES[:6]))
    sglang.scheduler.flush_cache()
    assert e.exists(NAMES) == 6
    sglang.update_weights_from_disk(flush=False)
    assert off(e), "that was before the change"


@pytest.mark.parametrize(("tags", "kept"), [(["kv_cache"], True), (["weights"], False), ([], False), (None, False)])
def test_memory_is_given_up(engine, sglang, tags, kept):
    e = engine()
    assert all(e.set(NAMES, PAGES[:6]))
    sglang.release_memory_occupation(types.SimpleNamespace(tags=tags))
    sglang.scheduler.flush_cache()
    assert e.exists(NAMES) == (6 if kept else 0)


@pytest.mark.parametrize("shm", [True, False], ids=["shared", "copied"])
def test_weights_change_amid_a_get(engine, sglang, monkeypatch, shm):
    e = engine(shm=shm)
    assert all(e.set(NAMES, PAGES[:6]))
    move = e.backend._move

    def moved(*args):
        results = move(*args)
        sglang.update_weights_from_disk()
        return results

    monkeypatch.setattr(e.backend, "_move", moved)
    assert e.backend.batch_get_v1(NAMES, fakes.rows_of(PAGES[:6])) == [False] * 6


def test_clear(engine, sglang):
    """SGLang's users clear the store where pages are wrong: this engine takes none of them again, others keep theirs."""
    e, other = engine(), engine()
    assert all(e.set(NAMES, PAGES[:6]))
    e.backend.clear()
    assert e.exists(NAMES) == 0 and e.get(NAMES, PAGES[:6]) == [False] * 6
    assert all(e.set(MORE, PAGES[:6])) and e.exists(MORE) == 6
    assert other.exists(NAMES) == 6 and other.exists(MORE) == 0
    e.backend.clear()
    assert e.exists(MORE) == 0


def test_changes_that_nobody_shows(engine, sglang, caplog):
    engine()
    assert "never change those of this engine" not in caplog.text
    weights.WEIGHTS.watched = False
    engine()
    assert "never change those of this engine" in caplog.text
