"""The backend of SGLang with a real agent and real plugins: what SGLang calls, and what goes wrong."""

import concurrent.futures
import contextlib
import gc
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import sglang_engine as rig
import sglang_fakes as fakes

fakes.install()

from kvport_agent.errors import ConfigError, UnsupportedError  # noqa: E402
from kvport_agent.messages import message  # noqa: E402
from kvport_sglang import backend as backend_  # noqa: E402
from kvport_sglang import config, early, fingerprint, prom, stats  # noqa: E402

PAGES = list(range(20))


def files(folder):
    """The files of the typical store that hold a page."""
    size = 2 * fakes.LAYERS * fakes.TOKENS * fakes.TOKEN_BYTES
    return sorted(p for p in (folder / "store").rglob("*") if p.is_file() and p.stat().st_size >= size)


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("layout", fakes.LAYOUTS)
@pytest.mark.parametrize("shm", [True, False], ids=["shared", "copied"])
@pytest.mark.parametrize("trace", ["store", "faults"])
def test_recorded_calls(engine, layout, shm, trace):
    e = engine(layout=layout, shm=shm)
    player = rig.Player(e)
    player.play(rig.recorded(trace))
    names = rig.keys(0, 17)
    other = engine(layout=layout, shm=shm)  # a new process would be the same to the agent
    assert other.exists(names) == 18
    assert other.get(names, PAGES[1:19]) == [True] * 18
    assert e.backend.faults.counts == other.backend.faults.counts == {}
    assert e.numbers()["kvport_sglang_put_done_pages_total"] == len(player.stored) + again(trace)
    moved = other.backend.get_stats()
    assert moved.prefetch_pgs and sum(moved.prefetch_pgs) == 18 and moved.backup_pgs == []
    assert other.backend.get_stats().prefetch_pgs == []


def again(trace):
    """Pages that the recording puts more than once."""
    puts = [k for r in rig.recorded(trace) if r.get("method") == "batch_set_v1" for k in range(r["keys"][0], r["keys"][1] + 1)]
    return len(puts) - len(set(puts))


@pytest.mark.parametrize("v1", [True, False], ids=["beside addresses", "alone"])
def test_tensors(engine, v1):
    e = engine(layout="layer_first", interface_v1=int(v1))
    names = rig.keys(0, 8)
    pages = [fakes.Tensor(b"".join(fakes.content(n).values())) for n in names]
    blank = [e.pool.get_dummy_flat_data_page() for _ in names]
    assert e.backend.batch_get(names, blank) == [None] * 9 and not any(blank[0].bytes())
    assert e.backend.batch_set(names, pages) and e.backend.set(rig.key(77), pages[0])
    got = e.backend.batch_get([*names, rig.key(99)], [*blank, e.pool.get_dummy_flat_data_page()])
    assert [g and g.bytes() for g in got] == [p.bytes() for p in pages] + [None]
    assert got[0] is blank[0]
    assert e.backend.get(rig.key(77)).bytes() == pages[0].bytes() and e.backend.get(rig.key(78)) is None
    assert not e.backend.batch_set(names, [fakes.Tensor(b"x" * 16)] * 9) and e.backend.faults.counts == {"batch_set": 1}
    if v1:  # the same page at its addresses has its bytes in another order
        assert e.exists(names) == 0 and e.get(names, PAGES[:9]) == [False] * 9
    else:
        assert e.exists(names) == 9 and e.backend.exists(names[3]) and not e.backend.exists(rig.key(99))


def test_pages_of_other_engines(engine):
    mine = engine()
    names = rig.keys(0, 5)
    assert all(mine.set(names, PAGES[:6]))
    others = [
        {"layout": "page_first_direct"},
        {"layout": "layer_first"},
        {"weights": b"other weights"},
        {"pool": fakes.MHATokenToKVPoolHost(dtype="torch.int32")},
        {"pool": fakes.MHATokenToKVPoolHost(storage_format_tag="token-major")},
        {"storage": {"tp_size": 2}},
        {"storage": {"tp_size": 2, "tp_rank": 1}},
        {"storage": {"pp_size": 2, "pp_rank": 1}},
        {"storage": {"is_mla_model": True, "dcp_size": 2, "dcp_rank": 1}},
    ]
    for more in others:
        e = engine(**more)
        assert e.exists(names) == 0, more
        assert e.get(names, PAGES[:6]) == [False] * 6, more
        assert all(e.set(names, PAGES[:6])) and all(e.get(names, PAGES[6:12])), more
    assert all(engine(storage={"dp_rank": 1, "dp_size": 2}).get(names, PAGES[:6])), "replicas share"
    assert all(mine.get(names, PAGES[:6]))


@pytest.mark.parametrize(("module", "name"), fingerprint._SHOW_ARGS)
def test_arguments_that_decide(engine, here, server_args, module, name):
    args = server_args(module, name, model_path=str(rig.model(here)), kv_cache_dtype="auto")
    names = rig.keys(0, 5)
    assert all(engine().set(names, PAGES[:6]))
    assert engine(storage={"model_name": f"{args.model_path}-a-format-of-the-pool"}).exists(names) == 6, "the weights are found"
    args.kv_cache_dtype = "fp8_e5m2"
    assert engine().exists(names) == 0


@pytest.mark.parametrize("alias", ["prod", "a path"])
def test_two_models_served_under_one_name(engine, here, server_args, alias):
    """The name that SGLang gives is the served one: it says nothing about the weights, even if it is a path."""
    served = {"model_name": str(rig.model(here, b"something else")) if alias == "a path" else alias}
    names = rig.keys(0, 5)
    args = server_args(model_path=str(rig.model(here, b"one")))
    assert all(engine(storage=served).set(names, PAGES[:6]))
    assert engine(storage={"model_name": "another alias"}).exists(names) == 6, "the same weights under another name"
    args.model_path = str(rig.model(here, b"two"))
    assert engine(storage=served).exists(names) == 0


def test_weights_that_are_not_here(engine, here, server_args):
    """Path and name stand for weights that are elsewhere; where there is no path, nothing can."""
    names, served = rig.keys(0, 5), {"model_name": "prod"}
    args = server_args(model_path="s3://models/one")
    assert all(engine(storage=served).set(names, PAGES[:6]))
    assert engine(storage=served).exists(names) == 6
    args.model_path = "s3://models/two"
    assert engine(storage=served).exists(names) == 0
    args.model_path = None
    with pytest.raises(UnsupportedError, match="prod are known"):
        engine(storage=served)


def test_a_hundred_damaged_pages(engine, here):
    e = engine()
    names = rig.keys(0, 149)
    for at in range(0, 150, 50):
        assert all(e.set(names[at : at + 50], list(range(50))))
    stored = files(here)
    assert len(stored) == 150
    for path in stored[:100]:
        damage(path)
    right = [r for at in range(0, 150, 50) for r in e.get(names[at : at + 50], list(range(50)))]
    assert right.count(False) == 100
    assert e.counts("kvport_integrity_failures_total", 100) == 100
    assert e.numbers()["kvport_sglang_get_failed_pages_total"] == 100
    for at in range(0, 150, 50):  # SGLang computes what did not come, and puts it again
        assert all(e.set(names[at : at + 50], list(range(50))))
        assert all(e.get(names[at : at + 50], list(range(50))))


def test_holes_are_mended(engine, here):
    e = engine()
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    before = set(files(here))
    assert all(e.set([rig.key("x")], [0]))
    for path in set(files(here)) - before:
        path.unlink()
    hole = [*names[:4], rig.key("x"), *names[4:]]
    other = engine()
    assert other.exists(hole) == 4
    assert other.get(hole, PAGES[:11]) == [True] * 4 + [False] + [True] * 6
    assert all(other.set(hole[4:], PAGES[:7]))
    assert other.exists(hole) == 11 and all(other.get(hole, PAGES[:11]))


def strike(pid, sign):
    os.kill(pid, sign)
    deadline = time.monotonic() + rig.LIMIT
    while True:
        with contextlib.suppress(OSError):
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ" and time.monotonic() < deadline:
                time.sleep(0.002)
                continue
        return


FAST = {"exists_ms": 50, "get_ms": 300, "put_ms": 300}


def test_plugin_stopped(engine):
    e = engine(settings=FAST)
    names, others = rig.keys(0, 9), rig.keys(40, 49)
    until(lambda: all(e.set(names, PAGES[:10])))
    until(lambda: all(e.set(others, PAGES[:10])))
    (pid,) = e.agent()[1]
    strike(pid, signal.SIGSTOP)
    assert e.exists(names) == 0
    assert e.get(names, PAGES[:10]) == [False] * 10
    assert e.set(rig.keys(20, 29), PAGES[:10]) == [False] * 10
    assert e.agent()[0] and e.backend._client.ready, "the agent has answered for it"
    before = e.pool.scribble(3)
    os.kill(pid, signal.SIGCONT)
    until(lambda: e.exists(others) == 10)
    assert e.pool.spare(before, []), "a late load was written to the pool"
    until(lambda: all(e.set(names, PAGES[:10])) and e.exists(names) == 10 and all(e.get(names, PAGES[:10])))


def until(what):
    deadline = time.monotonic() + rig.LIMIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_plugin_killed(engine):
    e = engine()
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    os.kill(e.agent()[1][0], signal.SIGKILL)
    e.get(names, PAGES[:10])
    until(lambda: e.exists(names) == 10 and all(e.get(names, PAGES[:10])))


def test_agent_killed(engine):
    e = engine()
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    agent, plugins = e.agent()
    os.kill(agent, signal.SIGKILL)
    e.exists(names)
    e.get(names, PAGES[:10])
    until(lambda: e.exists(names) == 10)
    assert all(e.get(names, PAGES[:10]))
    assert e.backend._client.lost == 1 and e.agent()[0] != agent
    assert e.counts("kvport_sglang_agents_lost_total", 1) == 1
    until(lambda: not any(pathlib.Path(f"/proc/{pid}/exe").exists() for pid in plugins))


def test_a_plugin_that_cannot_be_ended(engine, monkeypatch):
    """One that waits for a disk that hangs lives on; it has nothing of the pool, so a call is over when the agent is."""
    e = engine(settings={"get_ms": 60_000})
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    agent, (plugin,) = e.agent()
    child = subprocess.Popen(["sleep", "600"])
    pidfd, send = os.pidfd_open(child.pid), signal.pidfd_send_signal
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, sign: None if fd == pidfd else send(fd, sign))
    e.backend._client._link._fence.add(pidfd, child.pid)
    end = threading.Timer(2 * rig.LIMIT, child.kill)
    end.start()
    try:
        strike(plugin, signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            got = thread.submit(e.get, names, PAGES[:10])
            until(lambda: e.backend._client._running)
            os.kill(agent, signal.SIGKILL)
            assert got.result() == [False] * 10
        assert child.poll() is None
        until(lambda: e.exists(names) == 10 and all(e.get(names, PAGES[:10])))
    finally:
        end.cancel()
        child.kill()
        child.wait()


def test_agent_stopped(engine):
    e = engine(settings=FAST)
    names = rig.keys(0, 9)
    until(lambda: all(e.set(names, PAGES[:10])))
    agent = e.agent()[0]
    strike(agent, signal.SIGSTOP)
    assert e.exists(names) == 0
    assert e.get(names, PAGES[:10]) == [False] * 10
    before = e.pool.scribble(5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGCONT)
    until(lambda: e.exists(names) == 10)
    assert e.pool.spare(before, []), "an agent that was given up has written to the pool"
    assert e.agent()[0] != agent


def test_pool_shrinks(engine):
    e = engine()
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    agent = e.agent()[0]
    os.ftruncate(e.pool.allocator.fd, 4096)
    assert e.backend.batch_get_v1(names, fakes.rows_of(PAGES[:10])) == [False] * 10
    assert e.backend.batch_set_v1(rig.keys(30, 39), fakes.rows_of(PAGES[:10])) == [False] * 10
    assert e.exists(names) == 10 and e.agent()[0] == agent
    assert e.numbers()["kvport_sglang_get_memory_pages_total"] == 10
    os.ftruncate(e.pool.allocator.fd, e.pool.bytes)


def test_engine_dies(here, binaries):
    code = (
        "import sys, time, pathlib; sys.path[:0] = sys.argv[2:]\n"
        "import sglang_fakes; sglang_fakes.install()\nimport sglang_engine as rig\n"
        "e = rig.Engine(pathlib.Path(sys.argv[1])); e.set(rig.keys(0, 9), list(range(10)))\n"
        "print(*[e.agent()[0], *e.agent()[1]], flush=True); time.sleep(600)\n"
    )

    paths = [str(rig.HERE), str(rig.HERE.parent)]
    child = subprocess.Popen([sys.executable, "-c", code, str(here), *paths], stdout=subprocess.PIPE, text=True)
    lines = iter(child.stdout.readline, "")  # the agent says that it is ready, too
    pids = next([int(p) for p in line.split()] for line in lines if not line.startswith("kvport:"))
    assert len(pids) == 2
    child.kill()
    child.wait()
    until(lambda: not any(pathlib.Path(f"/proc/{p}/exe").exists() for p in pids))
    child.stdout.close()


def test_calls_at_once(engine):
    e = engine()
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    wrong = []

    def puts():
        for n in range(20):
            if not all(e.backend.batch_set_v1(rig.keys(100 + n, 100 + n), fakes.rows_of([40]))):
                wrong.append("put")

    def asks():
        for _ in range(50):
            if e.backend.batch_exists(names) != 10:
                wrong.append("exists")

    threads = [threading.Thread(target=t) for t in (puts, asks)]
    for t in threads:
        t.start()
    for _ in range(20):
        if e.backend.batch_get_v1(names, fakes.rows_of(PAGES[:10])) != [True] * 10:
            wrong.append("get")
        if not all(e.pool.holds(p, n) for p, n in zip(PAGES, names, strict=False)):
            wrong.append("content")
    for t in threads:
        t.join()
    assert wrong == []


def test_thousands_of_keys(engine, monkeypatch):
    e = engine()
    assert all(e.set(rig.keys(0, 9), PAGES[:10]))
    assert e.exists(rig.keys(0, 9) + rig.keys(1000, 6000)) == 10
    assert e.exists(rig.keys(0, 9) + rig.keys(1000, 1001) * 40_000) == 10
    monkeypatch.setattr(backend_, "_MOST_NUMBERS", 1000)  # several messages for one call
    many = rig.keys(0, 9) * 300
    assert e.backend.batch_get_v1(many, fakes.rows_of(PAGES[:10] * 300)) == [True] * 3000


def server(here):
    """A server that speaks RESP, or None where make deps has not fetched it."""
    program = rig.HERE.parent.parent / ".deps" / "valkey" / "valkey-server"
    assert program.exists(), "run make deps"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    child = subprocess.Popen(
        [str(program), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(here)], stdout=subprocess.DEVNULL
    )

    def up():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True

    until(up)
    return child, f"127.0.0.1:{port}"


def filled(value, values):
    """Put what a fixture leaves open into its config."""
    if isinstance(value, dict):
        return {k: filled(v, values) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(v, values) for v in value]
    for name, text in values.items():
        value = value.replace(f"@{name}@", text) if isinstance(value, str) else value
    return value


@pytest.mark.parametrize("name,fixture", list(rig.fixtures()), ids=lambda v: v if isinstance(v, str) else "")
def test_every_plugin(engine, here, name, fixture):
    child, address = server(here)
    try:
        inner = filled(fixture["setups"][0]["config"], {"TMP": str(here), "SERVER": address, "NAME": name, "ROLE": "kv_both"})
        more = {"connector": fixture["connector"], "inner": inner}
        if fixture.get("holds") or fixture.get("peers"):
            with pytest.raises(ConfigError, match="stores none"):
                engine(**more)
            return
        e = engine(**more)
        names = rig.keys(0, 17)
        assert e.exists(names) == 0
        assert e.set(names, PAGES[:18]) == [True] * 18
        until(lambda: e.exists(names) == 18)
        assert e.get(names, PAGES[1:19]) == [True] * 18
        assert e.backend.faults.counts == {}
    finally:
        child.kill()
        child.wait()


def test_store_hangs(engine, here):
    child, address = server(here)
    try:
        name, fixture = next((n, f) for n, f in rig.fixtures() if "server_full" in f.get("quota", {}))
        inner = filled(fixture["setups"][0]["config"], {"TMP": str(here), "SERVER": address, "NAME": name})
        e = engine(connector=fixture["connector"], inner=inner, settings=FAST)
        names = rig.keys(0, 9)
        until(lambda: all(e.set(names, PAGES[:10])))
        strike(child.pid, signal.SIGSTOP)
        for _ in range(3):
            assert e.exists(names) == 0
            assert e.get(names, PAGES[:10]) == [False] * 10
            assert e.set(rig.keys(20, 29), PAGES[:10]) == [False] * 10
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: all(e.set(names, PAGES[:10])) and e.exists(names) == 10 and all(e.get(names, PAGES[:10])))
    finally:
        child.kill()
        child.wait()


# -- the start


WRONG = {
    "kv_transfer_config: is missing": {"kv_transfer_config": None},
    "kv_transfer_config: is the outer": {"kv_transfer_config": {"kv_transfer_config": {}}},
    "kv_connector: is not known here": {"kv_connector": "x"},
    "kvport_sglang.exits_ms: is not known": {"kvport_sglang": {"exits_ms": 5}},
    "kvport_sglang.exists_ms: is 0": {"kvport_sglang": {"exists_ms": 0}},
    "kvport_sglang.get_ms: is True": {"kvport_sglang": {"get_ms": True}},
    "kvport_sglang.agent_socket_dir: is 3": {"kvport_sglang": {"agent_socket_dir": 3}},
    "kvport_sglang: is 3": {"kvport_sglang": 3},
    "get_ms: belongs into kvport_sglang": {"get_ms": 1000},
    "kv_transfer_config.kv_role: is 'kv_consumer', want kv_both": {"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_consumer"}},
    "kv_transfer_config.kv_role: is 'kv_producer', want kv_both": {"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_producer"}},
}


@pytest.mark.parametrize("want", WRONG)
def test_wrong_config(here, want):
    with pytest.raises(ConfigError, match=want):
        config.parse({**rig.extra(here), **WRONG[want]}, "r")


def test_config_before_the_model(here):
    def args(value, backend="dynamic"):
        return types.SimpleNamespace(hicache_storage_backend=backend, hicache_storage_backend_extra_config=value)

    wrong = rig.extra(here, connector="NoSuchConnector")
    early.check(None, args(json.dumps(rig.extra(here))))
    early.check(None, args(json.dumps(wrong), backend="file"))
    early.check(None, args({**wrong, "module_path": "json"}))
    for value in (json.dumps(wrong), wrong):
        with pytest.raises(ConfigError, match=r"kv_transfer_config: .*NoSuchConnector"):
            early.check(None, args(value))
    registry = types.SimpleNamespace(register=lambda *a: hooks.append(a))
    hooks = []

    sys.modules["sglang.srt.plugins.hook_registry"] = types.SimpleNamespace(
        HookRegistry=registry, HookType=types.SimpleNamespace(BEFORE="before", AFTER="after")
    )
    early.register()
    init = "sglang.srt.managers.scheduler.Scheduler.__init__"
    assert hooks[:2] == [(init, early.check, "before"), (init, early.made, "after")]
    assert {target.rpartition(".")[2] for target, _, _ in hooks} >= {"flush_cache", "update_weights_from_disk", "begin_weight_update"}


def text_of(here, **more):
    return json.dumps({**rig.extra(here), **more})


EARLY = {
    "hicache_storage_backend_extra_config: is no JSON: ": lambda here: "'" + text_of(here),
    "hicache_storage_backend_extra_config: is no JSON: .*column": lambda here: text_of(here)[:-1] + ",}",
    "hicache_storage_backend_extra_config: is no JSON object": lambda here: "[1]",
    "hicache_storage_backend_extra_config: .*No such file": lambda here: f"@{here}/none.json",
    "kv_connector: is not known here": lambda here: file_of(here, text_of(here, kv_connector="x")),
    "backend_name: is missing": lambda here: text_of(here).replace("backend_name", "name"),
    "class_name: is 'KvportHicache', want KvportHiCache": lambda here: text_of(here, class_name="KvportHicache"),
    "class_name: is missing": lambda here: text_of(here).replace("class_name", "class"),
    "module_path: is 'kvport_sgland', want kvport_sglang": lambda here: text_of(here, module_path="kvport_sgland"),
    "module_path: is 'kvport_sglang.none', want kvport_sglang": lambda here: text_of(here, module_path="kvport_sglang.none"),
    "module_path: is missing": lambda here: text_of(here).replace("module_path", "module"),
    "kv_transfer_config: is text, want the object itself": lambda here: text_of(here, kv_transfer_config="@/etc/kv.json"),
    "kvport_sglang.agent_socket_dir: /.* cannot be made": lambda here: text_of(here, kvport_sglang={"agent_socket_dir": f"{here}/no/such"}),
    "kvport_sglang.agent_socket_dir: /.* is too long": lambda here: text_of(here, kvport_sglang={"agent_socket_dir": f"{here}/{'x' * 90}"}),
}


def file_of(here, text):
    (here / "extra.json").write_text(text)
    return f"@{here}/extra.json"


@pytest.mark.parametrize("want", EARLY)
def test_mistakes_before_the_model(here, want):
    args = types.SimpleNamespace(hicache_storage_backend="dynamic", enable_hierarchical_cache=True)
    args.hicache_storage_backend_extra_config = EARLY[want](here)
    with pytest.raises(ConfigError, match=f"^{want}"):
        early.check(None, args)


@pytest.mark.parametrize(
    ("want", "more"),
    [
        ("--hicache-storage-backend is file, want dynamic", {"hicache_storage_backend": "file"}),
        ("--hicache-storage-backend is None, want dynamic", {"hicache_storage_backend": None}),
        ("--enable-hierarchical-cache is not given", {"enable_hierarchical_cache": False}),
        ("", {"enable_hierarchical_cache": False, "disaggregation_decode_enable_offload_kvcache": True}),
    ],
)
def test_a_config_that_is_not_used(here, caplog, want, more):
    args = {"hicache_storage_backend": "dynamic", "enable_hierarchical_cache": True, **more}
    early.check(None, types.SimpleNamespace(hicache_storage_backend_extra_config=text_of(here), **args))
    assert (want in caplog.text) if want else ("nothing is stored" not in caplog.text)
    caplog.clear()
    for other in (None, json.dumps({"tp_lcm_size": 2}), "@file.yaml", "{"):
        if want or other != "{":  # SGLang reads it, and says so
            early.check(None, types.SimpleNamespace(hicache_storage_backend_extra_config=other, **args))
    assert caplog.text == ""


def test_no_folder_for_sockets(here, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/folder")
    with pytest.raises(ConfigError, match=r"^kvport_sglang.agent_socket_dir: /no/such/folder/kvport cannot be made \(No such file"):
        config.spawner(config.parse(rig.extra(here), "r"), "r")
    (here / "open").mkdir()
    (here / "open").chmod(0o755)
    with pytest.raises(ConfigError, match=r"is not a folder of ours .* set XDG_RUNTIME_DIR"):
        config.spawner(config.parse(rig.extra(here, settings={"agent_socket_dir": str(here / "open")}), "r"), "r")


def test_more_memory_than_there_is(engine, monkeypatch):
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal"))
    monkeypatch.setattr(fakes, "TOKEN_BYTES", total // 4096 // 64 // 8 * 8)  # 4096 pages of 96 of these are more than all
    pool = fakes.MHATokenToKVPoolHost()
    with pytest.raises(ConfigError, match=r"^kvport_sglang.memory_bytes: is 1099511627776: .*more than half of the"):
        engine(pool=pool, settings={"memory_bytes": 1 << 40})
    pool.close()
    gc.collect()  # the error holds the pool, whose map has a descriptor of its own: others count them


def test_a_pool_that_is_refused_leaves_nothing(here):
    """Where SGLang attaches the backend to a running engine, it keeps one that has raised."""
    rig.Engine(here).close()
    pool = fakes.MHATokenToKVPoolHost()
    fds, maps = len(os.listdir("/proc/self/fd")), mappings()
    e = rig.Engine(here, pool=pool)
    names = rig.keys(0, 5)
    assert all(e.set(names, PAGES[:6]))
    with pytest.raises(UnsupportedError, match="kind mamba"):
        e.backend.register_mem_host_pool_v2(e.pool, fakes.PoolName.MAMBA)
    assert e.exists(names) == 0 and not any(e.get(names, PAGES[:6])) and not any(e.set(names, PAGES[:6]))
    # Nobody closes the backend: the agent has been left, and ends by itself.
    assert len(os.listdir("/proc/self/fd")) == fds and mappings() == maps
    pool.close()


def test_what_cannot_be_served(here, engine):
    with pytest.raises(UnsupportedError, match="split the heads"):
        engine(storage={"should_split_heads": True})
    with pytest.raises(UnsupportedError, match="does not name the model"):
        backend_.KvportHiCache(fakes.storage_config(rig.extra(here), ""))
    with pytest.raises(ConfigError, match="memory_bytes: is 100, want at least two pages"):
        engine(settings={"memory_bytes": 100})
    e = engine()
    with pytest.raises(UnsupportedError, match="another pool"):
        e.backend.register_mem_pool_host(fakes.MHATokenToKVPoolHost())
    assert e.backend.batch_get_v1([rig.key(1)], fakes.rows_of([1, 2])) == [False], "rows that do not fit the keys"
    assert e.backend.faults.counts == {"batch_get_v1": 1}
    assert e.backend.batch_get_v1([], fakes.rows_of([])) == [] and e.backend.batch_exists([]) == 0


def test_a_pool_of_two_pieces(engine):
    pool = fakes.MHATokenToKVPoolHost(shm=False)
    other = fakes.MHATokenToKVPoolHost()
    pool.allocator = other.allocator  # its first piece is not where the pages are
    e = engine(pool=pool)
    names = rig.keys(0, 5)
    assert all(e.set(names, PAGES[:6])) and all(e.get(names, PAGES[6:12]))
    assert e.numbers()["kvport_sglang_copied_bytes_total"] > 0 and e.backend.faults.counts == {}


def test_ranks_of_mla(engine):
    names = rig.keys(0, 3)
    first = engine(storage={"tp_size": 2, "is_mla_model": True})
    assert all(first.set(names, PAGES[:4]))
    assert all(engine(storage={"tp_size": 2, "tp_rank": 1, "is_mla_model": True}).get(names, PAGES[:4]))


def test_ranks_of_mla_without_a_shared_store(engine, here, caplog):
    """Rank 0 stores for all: nobody else sees what is in a plugin of its own."""
    mla = {"tp_size": 2, "tp_rank": 1, "is_mla_model": True}
    tier = next(f for _, f in rig.fixtures() if f.get("typical") == "tier")
    own = {"connector": tier["connector"], "inner": filled(tier["setups"][-1]["config"], {"TMP": str(here)})}
    engine(storage=mla)
    engine(storage={"tp_size": 2}, **own)
    assert "nothing will be found" not in caplog.text
    engine(storage=mla, **own)
    assert "nothing will be found" in caplog.text


def test_one_config_in_two_processes(engine, here):
    """Replicas get one config, and with it one engine_id."""
    inner = {**rig.extra(here)["kv_transfer_config"], "engine_id": "prod"}
    one, two = engine(kv_transfer_config=inner), engine(kv_transfer_config=inner)
    assert one.agent()[0] != two.agent()[0]
    names = rig.keys(0, 5)
    assert all(one.set(names, PAGES[:6])) and two.exists(names) == 6
    assert all(two.set(rig.keys(10, 15), PAGES[:6])) and all(one.get(rig.keys(10, 15), PAGES[:6]))


def test_the_hosts_deadlines_follow_ours(here, binaries):
    """Else the host ends a load before the get that waits for it, and with it a plugin that is at work."""

    def parsed(named, **own):
        inner = {"kv_connector": rig.typical(), "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(here)}}
        got = config.parse({"kv_transfer_config": {**inner, **named}, "kvport_sglang": own}, "r")
        return got, json.loads(got.text).get("kvport")

    def limits(text):
        command = [binaries / "kvport", "agent", "--check", "--kv-transfer-config", text]
        said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return said["load_ms"], said["save_ms"]

    got, host = parsed({})
    assert host is None and got.doubts == () and limits(got.text) == (5500, 30500)
    got, host = parsed({}, exists_ms=3000, get_ms=8000.5, put_ms=60_000)
    assert host == {"deadlines": {"later": "3000ms", "transfer": "8001ms", "save": "60000ms"}} and got.doubts == ()
    assert limits(got.text) == (8501, 60500)
    named = {"kvport": {"trust": "staged", "deadlines": {"transfer": "1s", "grace": "1s"}}}
    got, host = parsed(named, get_ms=8000, put_ms=60_000)
    assert host == {"trust": "staged", "deadlines": {"transfer": "1s", "grace": "1s", "save": "60000ms"}}
    assert [d.partition(",")[0] for d in got.doubts] == ["get_ms: is 8000"] and "kvport.deadlines.transfer is '1s'" in got.doubts[0]
    assert parsed(named)[0].doubts == (), "whoever names the host's only knows what they want"
    for wrong in (3, None, {"deadlines": 3}):
        got, host = parsed({"kvport": wrong}, get_ms=8000)
        assert host == wrong and got.doubts == (), "the host says so"


def test_deadlines_that_sglang_does_not_wait_for(here, engine, caplog):
    """It ends where a call of a request that was given up takes longer than that amid a flush of its caches."""

    def doubted(**own):
        return [d.partition(":")[0] for d in config.parse({**rig.extra(here), "kvport_sglang": own}, "r").doubts]

    assert doubted(exists_ms=9999, get_ms=8999) == []
    assert doubted(exists_ms=10_000, get_ms=9000) == ["exists_ms", "get_ms"]
    engine(settings={"get_ms": 20_000})
    assert "kvport_sglang.get_ms: is 20000, want less than 9000" in caplog.text


def test_keys():
    assert backend_.key_of(rig.key(1)).hex() == rig.key(1)
    odd = {backend_.key_of(k) for k in ("", "zz", "0" * 64, rig.key(1)[:-1], rig.key(1) + "00", rig.key(1))}
    assert len(odd) == 6 and all(len(k) == 32 and any(k) for k in odd)
    assert backend_.flat_key_of(rig.key(1)) != backend_.key_of(rig.key(1))


def test_numbers_across_agents():
    def state(n):
        state = message("AgentState")()
        state.counters.add(name="a_total", labels=["call", "get"], value=n)
        state.counters.add(name="g", value=n, gauge=True)
        h = state.counters.add(name="h", labels=["call", "get"]).histogram
        h.bounds.append(1)
        h.counts.extend([n, 0])
        h.sum = n / 2
        return state

    def some():
        return {k: v for k, v in numbers.all().items() if k not in stats.SHIM}

    numbers = stats.Numbers()
    numbers.take_state(state(3))
    assert some() == {'a_total{call="get"}': 3, "g": 3, 'h_count{call="get"}': 3, 'h_sum{call="get"}': 1.5}
    numbers.agents_lost(1)
    assert some() == {'a_total{call="get"}': 3, "g": 0, 'h_count{call="get"}': 3, 'h_sum{call="get"}': 1.5}
    assert numbers.all()["kvport_sglang_agents_lost_total"] == 1
    numbers.take_state(state(2))
    assert some() == {'a_total{call="get"}': 5, "g": 2, 'h_count{call="get"}': 5, 'h_sum{call="get"}': 2.5}


def test_an_agent_that_does_not_come_back(engine):
    e = engine()
    assert all(e.set(rig.keys(0, 9), PAGES[:10])) and e.counts("kvport_plugin_up", 1) == 1
    e.backend._client._link._spawner._binary = shutil.which("false")
    os.kill(e.agent()[0], signal.SIGKILL)
    assert e.counts("kvport_sglang_agents_lost_total", 1) == 1
    assert e.counts("kvport_plugin_up", 0) == 0, "a gauge of an agent that has ended"
    assert e.numbers()["kvport_sglang_put_done_pages_total"] == 10


def test_numbers_are_on_sglangs_page(engine, here, monkeypatch):
    import fakes as vllm

    monkeypatch.setattr(prom, "_EVERY", 0.0)
    monkeypatch.setattr(vllm.Metric, "shown", {})

    def shown(name):
        rank = {("tp_rank", "1"), ("pp_rank", "0"), ("dp_rank", "0"), ("attn_cp_rank", "0")}
        return sum(v for (n, labels), v in vllm.Metric.shown.items() if n == name and rank <= set(labels))

    ranks = {"tp_size": 2, "tp_rank": 1}
    e = engine(storage=ranks)
    names = rig.keys(0, 9)
    assert all(e.set(names, PAGES[:10]))
    e.backend.get_stats()
    assert shown("kvport_sglang_put_done_pages_total") == 10
    assert ("kvport_sglang_faults_total", 0) in [(n, v) for (n, _), v in vllm.Metric.shown.items()], "it is there before anything happened"
    damage(files(here)[0])
    e.get(names, PAGES[:10])
    e.counts("kvport_integrity_failures_total", 1)
    e.backend.get_stats()
    assert shown("kvport_integrity_failures_total") == 1 and shown("kvport_plugin_up") == 1
    assert shown("kvport_agent_pages_seconds") > 0, "the time of the calls"
    e.backend.close()
    assert shown("kvport_plugin_up") == 0, "nobody asks after a detach"
    other = engine(storage=ranks)
    assert all(other.set(rig.keys(20, 24), PAGES[:5]))
    other.backend.get_stats()
    assert shown("kvport_sglang_put_done_pages_total") == 15 and e.backend.faults.counts == other.backend.faults.counts == {}
    vllm.Metric.shown.clear()
    silent = engine(storage={"enable_storage_metrics": False})
    silent.set(names, PAGES[:10])
    silent.backend.get_stats()
    assert vllm.Metric.shown == {}


def test_every_number_is_on_the_page_of_metrics(engine):
    page = (rig.HERE.parent.parent / "docs" / "metrics.md").read_text()
    rows = {name: text for name, text in re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)}
    ours = {name: text for name, text in rows.items() if name.startswith("kvport_sglang_")}
    assert ours == stats.SHIM
    e = engine()
    e.set(rig.keys(0, 9), PAGES[:10])
    e.counts("kvport_agent_pages_total", 10)
    said = e.backend.numbers.take()["help"]
    agent = {name: text for name, text in said.items() if name.startswith("kvport_agent_")}
    assert len(agent) == 4 and agent.items() <= rows.items()
    assert not [name for name in said if name not in rows and not name.startswith("kvport_connector_")]


def mappings():
    """How often memory of ours is mapped here."""
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:kvport-cache")


def test_attach_and_detach(here):
    """SGLang detaches a backend, and attaches another, as often as it is told."""

    def turn():
        e = rig.Engine(here, shm=False)
        assert all(e.set(rig.keys(0, 5), PAGES[:6])) and all(e.get(rig.keys(0, 5), PAGES[:6]))
        e.close()
        assert e.exists(rig.keys(0, 5)) == 0 and e.get(rig.keys(0, 5), PAGES[:6]) == [False] * 6

    turn()
    fds, maps = len(os.listdir("/proc/self/fd")), mappings()
    for _ in range(3):
        turn()
    assert len(os.listdir("/proc/self/fd")) == fds and mappings() == maps == 0
    assert not list((here / "run").rglob("*.json")), "a config, with its passwords, stays"


def test_a_start_that_fails(here, monkeypatch):
    pool = fakes.MHATokenToKVPoolHost()
    fds, maps = len(os.listdir("/proc/self/fd")), mappings()

    def fails(*_):
        raise OSError("no thread")

    monkeypatch.setattr(threading.Thread, "start", fails)
    backend = backend_.KvportHiCache(fakes.storage_config(rig.extra(here), rig.model(here)))
    for _ in range(2):
        with pytest.raises(OSError, match="no thread"):
            backend.register_mem_pool_host(pool)
    assert len(os.listdir("/proc/self/fd")) == fds and mappings() == maps
    pool.close()


def test_memory_that_is_in_use_stays(engine):
    e = engine(shm=False)
    bounce = e.backend._bounce
    with bounce.places("get", 1.0) as places:
        bounce.close()
        bounce.copy_in(places[0], [bounce.memfd.address], [8])
    with bounce.places("put", 1.0) as places:
        assert places is not None
    bounce.close()


def test_nothing_is_left(engine, here):
    e = engine()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        shutil.rmtree(here / "store", ignore_errors=True)
        e.set(rig.keys(0, 5), PAGES[:6])
        e.get(rig.keys(0, 5), PAGES[:6])
    assert len(os.listdir("/proc/self/fd")) == fds
