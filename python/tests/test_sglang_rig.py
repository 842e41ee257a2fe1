"""The tests under a real SGLang, without one: what their verdicts rest on."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = ROOT / "tests" / "sglang" / "run.py"
sys.path += [str(ROOT / "tests" / "vllm"), str(ROOT / "tests" / "sglang"), str(ROOT / "tests" / "sglang" / "stubs"), str(ROOT / "scripts")]

import calls_log  # noqa: E402
import same  # noqa: E402
import served  # noqa: E402
import sglang_setup  # noqa: E402
import trouble  # noqa: E402
import vllm_setup  # noqa: E402
from relay import FROM_SERVER, TO_SERVER, Relay  # noqa: E402
from rig import Failed, Result, Rig  # noqa: E402


@pytest.fixture
def line():
    """A line without a model."""
    rig = Rig.__new__(Rig)
    rig.counts, rig.begun = {}, time.monotonic()
    return rig


@pytest.fixture
def engine(line, tmp_path):
    """An engine without a process, which has its logs."""
    e = served.SGLang.__new__(served.SGLang)
    e.rig, e.name, e.calls_log, e.ours = line, "engine", tmp_path / "calls", False
    return e


def test_a_wrong_token_is_named(line):
    spec = importlib.util.spec_from_file_location("engine_of_sglang", RUN.with_name("engine.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = {"output_ids": [1, 2, 4], "meta_info": {"finish_reason": {"type": "length"}, "cached_tokens_details": {"storage": 16}}}
    got = Result(module.result(output, 1.0))
    assert got.cached == {"device": 0, "host": 0, "storage": 16}
    line.equal("same", [Result(ids=[1, 2, 4])], [got])
    with pytest.raises(Failed, match=r"cold: answer 0 is not what it must be, from token 2 of 3 on \(finish length\)"):
        line.equal("cold", [Result(ids=[1, 2, 3])], [got])


def test_calls_that_raise_or_never_end(engine):
    log = calls_log.Log(str(engine.calls_log))
    assert log.call("batch_get_v1", lambda keys: [True, False], ["a", "b"]) == [True, False]
    engine.check_calls()
    (row,) = engine.calls("batch_get_v1")
    assert (row["keys"], row["done"], row["raised"]) == (2, 1, "")
    begun, go_on = threading.Event(), threading.Event()

    def hangs(_keys):
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=log.call, args=("batch_exists", hangs, ["a"]))
    thread.start()
    begun.wait()
    with pytest.raises(Failed, match=r"have not ended: .*batch_exists"):
        engine.check_calls(0.05)
    go_on.set()
    thread.join()
    engine.check_calls()
    with pytest.raises(ZeroDivisionError):
        log.call("batch_set_v1", lambda keys: 1 // 0, ["a"])
    with pytest.raises(Failed, match=r"have raised: .*ZeroDivisionError"):
        engine.check_calls()


def test_numbers_are_new(engine):
    path = pathlib.Path(f"{engine.calls_log}.numbers")
    with pytest.raises(Failed, match="new numbers"):
        engine.numbers(0.05)
    path.write_text(json.dumps({"a": 1, 'b{c="d"}': 2, "b": 3}))
    os.utime(path, (0, 0))
    with pytest.raises(Failed, match="new numbers"):
        engine.numbers(0.05)
    os.utime(path, (time.time() + 600,) * 2)
    assert (engine.number("a"), engine.number("b"), engine.number("b", "d"), engine.number("e")) == (1, 5, 2, 0)


def test_faults_of_the_backend_count(engine):
    engine.ours = True
    calls_log.Log(str(engine.calls_log)).call("batch_exists", len, ["a"])
    path = pathlib.Path(f"{engine.calls_log}.numbers")
    path.write_text(json.dumps({"kvport_sglang_faults_total": 1}))
    os.utime(path, (time.time() + 600,) * 2)
    with pytest.raises(Failed, match="1 exceptions"):
        engine.check_calls()


@pytest.mark.parametrize("whole", [False, True])
def test_no_connector_is_no_success(line, monkeypatch, whole):
    line.options = type("Options", (), {"connector": "", "all": whole})
    monkeypatch.setattr(same, "stored", lambda rig: [])
    with pytest.raises(Failed, match="no connector"):
        same.equal_cases(line)


def test_what_others_wrote_is_planted(tmp_path):
    """Each file of one engine gets the content of one of another's, whoever has more."""
    folder = same.Folder(tmp_path)

    def write(name, count):
        for n in range(count):
            path = tmp_path / "0" / f"{name}" / f"{n}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {n}")

    write("a", 2)
    assert folder.wrote("one") == 2
    write("b", 3)
    assert (len(folder.new()), folder.wrote("other"), len(folder.new())) == (3, 3, 0)
    folder.plant("one", "other")
    assert [p.read_text() for p in sorted(folder.of["other"])] == ["a 0", "a 1", "a 0"]
    folder.plant("other", "one")
    assert [p.read_text() for p in sorted(folder.of["one"])] == ["b 0", "b 1"], "what was planted is not what they wrote"


def test_rounds_of_kills():
    """The full counts are those that are promised, and each kind of victim is struck amid gets and puts."""
    line = type("Line", (), {"options": type("Options", (), {"kills": 20, "seed": 1, "policies": trouble.POLICIES})})
    todo = trouble.rounds(line, "wait_complete")
    counts = {who: sum(victim == who for victim, _, _ in todo) for who in ("plugin", "agent")}
    assert counts == {"plugin": 20, "agent": 3}
    assert {(victim, kind) for victim, _, kind in todo} == {(v, k) for v in ("plugin", "agent") for k in ("get", "put")}
    assert sum(signum == signal.SIGSTOP for _, signum, _ in todo) == 4
    assert len(trouble.rounds(line, "timeout")) == 5, "fewer under the others"
    few = trouble.rounds(line, "best_effort")
    assert {kind for _, _, kind in few} == {"put"} and any(signum == signal.SIGSTOP for _, signum, _ in few)
    line.options.kills = 2
    assert len(few := trouble.rounds(line, "wait_complete")) == 3 and any(signum == signal.SIGSTOP for _, signum, _ in few)


@pytest.fixture
def case(line):
    """A case of the line store, whose engine answers in given seconds, and what happened in order."""
    line.notes, line.want = [], lambda prompts: [Result(ids=[1])] * len(prompts)
    c = trouble.Case.__new__(trouble.Case)
    c.rig, c.policy, c.alone, c.prompt, c.held, c.settings = line, "timeout", 0.1, [1], True, trouble.Case.LONG
    c.happened, c.answers, c.calls = [], [], []
    c.comes_back = lambda: c.happened.append("back")

    class Engine:
        def rows(self):
            return c.calls

        def run(self, prompts):
            return [Result(ids=[1], seconds=c.answers.pop(0), cached={"storage": 0}, late=0.0)]

        def flush(self):
            c.happened.append("asked")

        settle = flush

    c.engine, c.trouble = Engine(), lambda: c.happened.append("trouble") or contextlib.nullcontext()
    return c


def test_a_try_that_shows_nothing_is_made_anew(case):
    """Amid new trouble, once the store is back: pages that a get has hung over are hidden for a while."""
    case.ended = lambda kind: [{}]
    case.answers = [99.0, 1.0]
    assert case.ask("slow", case.trouble).seconds == 1.0
    assert case.happened == ["trouble", "asked", "asked", "back", "trouble", "asked", "asked"]
    case.answers = [99.0, 98.0, 97.0]
    with pytest.raises(Failed, match=r"store slow: 99\.0 of at most 13\.\d s; 98\.0 of .*; 97\.0 of"):
        case.ask("slow", case.trouble)
    case.ended, case.answers = (lambda kind: [] if kind == "get" else [{}]), [1.0] * 3
    with pytest.raises(Failed, match="without get"):
        case.ask("hung amid a get", case.trouble, ("exists", "get"))


def test_a_store_is_back_when_pages_come(case):
    """Under timeout also if SGLang has not waited for them; under best_effort when they are found."""
    done = {"batch_exists": 18, "batch_get_v1": 17, "batch_set_v1": 0}

    def succeed(policy):
        case.calls = [{"method": "batch_exists", "done": 99, "seconds": 1.0}]  # before that
        case.calls += [{"method": method, "done": n, "seconds": 1.0} for method, n in done.items()]
        return trouble.succeed(policy, case.engine, 1, 18)

    assert not succeed("timeout") and succeed("best_effort")
    done["batch_get_v1"] = 18
    assert succeed("timeout") and not succeed("wait_complete")


def test_a_report_is_a_row():
    spec = importlib.util.spec_from_file_location("run_of_sglang", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.SHORT) < set(module.LINES)
    report = {"line": "equal", "counts": {"tokens equal": 32, "longest": "1 s"}, "ok": True, "error": "", "seconds": 7}
    report |= {"before": 0.5, "after": 1.25, "commit": "abc-dirty", "all": True}
    assert module.row(report) == "| `equal` `--all` | 32 tokens equal; longest: 1 s | 7 | 0.5 to 1.2 | abc-dirty |"
    report |= {"ok": False, "error": "Traceback:\n  it broke", "all": False}
    assert module.row(report) == "| `equal` | FAILED: it broke | 7 | 0.5 to 1.2 | abc-dirty |"


def test_lines_share_engines(line, tmp_path, monkeypatch):
    """An engine outlives the line that started it, comes to the next one with empty caches, and is started again after stop."""
    made = []

    class Engine:
        def __init__(self, rig, name, config, folder=None, **more):
            assert folder.is_dir()
            self.rig, self.name, self.flushed, self.stopped = rig, name, 0, 0
            rig.processes.append(self)
            made.append(self)

        def flush(self):
            self.flushed += 1

        def stop(self):
            self.stopped += 1

    monkeypatch.setattr(served, "SGLang", Engine)
    monkeypatch.setattr(served, "storage", lambda rig, folder: ("label", "NameConnector", {"folder": str(folder)}))
    shared, other = served.Shared(tmp_path), Rig.__new__(Rig)
    line.processes, other.processes = [], []
    engine = shared.kvport(line)
    assert shared.file(line) is not engine and not line.processes
    assert shared.kvport(other) is engine and engine.rig is other and engine.flushed == 2
    shared.stop()
    assert [e.stopped for e in made] == [1, 1] and shared.kvport(other) is not engine and len(made) == 3


def test_unknown_connectors_are_refused():
    done = subprocess.run([sys.executable, RUN, "--list", "--connector", "typo"], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "no connector of these tests: typo" in done.stderr, done
    assert subprocess.run([sys.executable, RUN, "--list"], check=False, capture_output=True).returncode == 0


def test_plugins_are_those_of_the_wheel():
    """SGLang finds kvport where the tests name it, as it would where the wheel is installed."""
    text = (ROOT / "python" / "pyproject.toml").read_text()
    ((name, value),) = re.findall(r'entry-points."sglang.srt.plugins"\]\n(\w+) = "(.*)"', text)
    (named,) = (ROOT / "tests" / "sglang" / "stubs").glob("*.dist-info/entry_points.txt")
    assert f"{name} = {value}" in named.read_text().splitlines()


@pytest.fixture
def echo():
    """A server that sends everything back; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=back, args=(client,), daemon=True).start()

        def back(client):
            with client:
                while data := client.recv(1 << 16):
                    client.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_relay(echo):
    relay = Relay(echo)
    there = ("127.0.0.1", int(relay.address.split(":")[1]))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(there, 10)
    relay.come()
    for direction in TO_SERVER, FROM_SERVER:
        with socket.create_connection(there, 30) as client:
            with relay.hung(direction, 8):
                client.sendall(b"1234")
                assert client.recv(64) == b"1234" and not relay.hangs
                client.sendall(b"567890")
                assert relay.held(30), direction
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.recv(64)
            client.settimeout(30)
            assert client.recv(64) == b"567890"
            began = time.monotonic()
            with relay.slow(0.2):
                client.sendall(b"late")
                assert client.recv(64) == b"late" and time.monotonic() - began >= 0.2
    relay.stop()


def test_set_up_refuses_another_python(tmp_path, monkeypatch):
    (tmp_path / "venv" / "lib" / "python3.12").mkdir(parents=True)
    with pytest.raises(vllm_setup.SetupError, match=r"has Python 3\.12"):
        sglang_setup.check_python(tmp_path)
    monkeypatch.setattr(sglang_setup.platform, "libc_ver", lambda: ("glibc", "2.31"))
    with pytest.raises(vllm_setup.SetupError, match=r"glibc 2\.34 or later, this is 2\.31"):
        sglang_setup.check_python(tmp_path)


def test_set_up_refuses_a_machine_without_headers(monkeypatch):
    monkeypatch.setattr(sglang_setup, "PROBE", "#include <no/such/header.h>\n")
    with pytest.raises(vllm_setup.SetupError, match="python3-dev"):
        sglang_setup.check_compiler(sys.executable)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(vllm_setup.SetupError, match="g\\+\\+"):
        sglang_setup.check_compiler(sys.executable)
