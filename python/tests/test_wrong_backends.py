"""Each wrong backend is caught by the rule that it breaks; the right one breaks none."""

import os
import signal
import time

import pytest
import sglang_engine as rig
import sglang_fakes as fakes

fakes.install()

import wrong_backends  # noqa: E402
from test_sglang import FAST, damage, files, strike, until  # noqa: E402

PAGES = list(range(20))


def played(here, shm):
    """Recorded calls, then a hole, strangers, and damage."""
    e = rig.Engine(here, shm=shm)
    try:
        player = rig.Player(e)
        player.play(rig.recorded("store"))
        names = rig.keys(0, 9)
        player.batch_exists([*names[:4], rig.key("hole"), *names[4:]])
        player.batch_get_v1([*names, rig.key("hole"), *rig.keys(50, 53, "stranger")], PAGES[:15])
        player.batch_set_v1(rig.keys(0, 5, "more"), PAGES[:6])
        player.batch_get_v1([*rig.keys(0, 5, "more"), *names], PAGES[:16])
        for path in files(here):
            damage(path)
        for name, ok in zip(names, e.get(names, PAGES[:10]), strict=True):
            rig.hold(7, not ok, f"{name} is damaged")
        player.batch_set_v1(names, PAGES[:10])
        player.batch_get_v1(names, PAGES[5:15])
    finally:
        e.close()


def apart(here, _shm):
    """Engines that differ in one thing."""
    made = [rig.Engine(here)]
    names = rig.keys(0, 5)
    try:
        assert all(made[0].set(names, PAGES[:6]))
        for more in (
            {"layout": "page_first_direct"},
            {"pool": fakes.MHATokenToKVPoolHost(dtype="torch.int32")},
            {"storage": {"tp_size": 2, "tp_rank": 1}},
            {"weights": b"other"},
        ):
            made.append(rig.Engine(here, **more))
            rig.hold(2, not any(made[-1].get(names, PAGES[:6])), f"pages of another engine came: {more}")
    finally:
        for e in made:
            e.close()


def stuck(here, _shm):
    """The plugin does nothing any more."""
    e = rig.Engine(here, settings=FAST)
    names = rig.keys(0, 9)
    try:
        until(lambda: all(e.set(names, PAGES[:10])))
        (pid,) = e.agent()[1]
        e.limit = 10.0
        strike(pid, signal.SIGSTOP)
        try:
            e.exists(names)
            e.get(names, PAGES[:10])
            e.set(rig.keys(20, 29), PAGES[:10])
        finally:
            os.kill(pid, signal.SIGCONT)
    finally:
        e.close()


def fence(here, _shm):
    """The agent does nothing until after it was given up."""
    e = rig.Engine(here, settings=FAST)
    names = rig.keys(0, 9)
    try:
        until(lambda: all(e.set(names, PAGES[:10])))
        agent = e.agent()[0]
        strike(agent, signal.SIGSTOP)
        e.get(names, PAGES[:10])
        before = e.pool.scribble(5)
        try:
            os.kill(agent, signal.SIGCONT)
        except ProcessLookupError:
            return
        end = time.monotonic() + 20  # other calls say nothing of when the agent comes to that get
        until(lambda: not e.pool.spare(before, []) or time.monotonic() > end)
        rig.hold(4, e.pool.spare(before, []), "an agent that was given up has written to the pool")
    finally:
        e.close()


def bug(here, _shm):
    """Rows that do not fit."""
    e = rig.Engine(here)
    try:
        e._timed(lambda: e.backend.batch_get_v1([rig.key(1)], fakes.rows_of([1, 2])))
    finally:
        e.close()


SCENES = [
    (played, wrong_backends.PLAYED),
    (apart, wrong_backends.APART),
    (stuck, wrong_backends.STUCK),
    (fence, wrong_backends.FENCE),
    (bug, wrong_backends.BUG),
]


RIGHT = [(s, True) for s, _ in SCENES] + [(played, False)]


@pytest.mark.parametrize("scene,shm", RIGHT, ids=lambda v: getattr(v, "__name__", "shared" if v else "copied"))
def test_right_backend(here, scene, shm):
    scene(here, shm)


@pytest.mark.parametrize(
    "scene,wrong", [(s, w) for s, ws in SCENES for w in ws], ids=lambda v: v.name if hasattr(v, "name") else v.__name__
)
def test_wrong_backend(here, scene, wrong, monkeypatch):
    wrong.plant(monkeypatch)
    with pytest.raises(rig.BrokenError) as broken:
        scene(here, wrong.shm)
    print(f"\n{wrong.name}: {broken.value}")
    assert broken.value.number == wrong.number


def test_wrong_backends_have_names():
    names = {w.name for w in wrong_backends.ALL}
    assert len(names) == len(wrong_backends.ALL)
    print(f"\n{len(names)} wrong backends of {len({w.number for w in wrong_backends.ALL})} rules")
