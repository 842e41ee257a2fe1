"""Which tests scripts/soak.py takes for a sample."""

import importlib.util
import pathlib
import sys

import pytest


@pytest.fixture(scope="module")
def soak():
    path = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def made(soak, *names):
    return [soak.Test("./" + name.split()[0], name.split()[1], pathlib.Path("x.test")) for name in names]


def attempts(soak, monkeypatch, needs, known, seconds, order):
    """Which tests a sample runs where each needs so many seconds, with the limit of each, and those that ended."""
    now, tried = [0.0], []
    monkeypatch.setattr(soak.time, "monotonic", lambda: now[0])

    def attempt(test, limit):
        need = needs[test.title()]
        now[0] += min(need, limit)
        tried.append((test.title(), limit))
        return (True if need <= limit else None), []

    results = soak.sample(made(soak, *order), known, seconds, attempt)
    return tried, [test.title() for test, _, _ in results]


def test_known_tests_that_do_not_fit_are_passed_over(soak, monkeypatch):
    needs = {"a TestLong": 100, "a TestShort": 10, "b TestShort": 60, "b TestLast": 30}
    tried, ended = attempts(soak, monkeypatch, needs, dict(needs), 120, list(needs))
    assert tried == [("a TestShort", 120), ("b TestShort", 110), ("b TestLast", 50)]
    assert ended == ["a TestShort", "b TestShort", "b TestLast"]


def test_a_test_without_a_row_is_given_up_for_the_next(soak, monkeypatch):
    needs = {"a TestTurns": 3600, "a TestQuick": 5, "b TestHours": 9999, "b TestQuick": 5}
    tried, ended = attempts(soak, monkeypatch, needs, {}, 120, list(needs))
    assert tried == [(title, 20) for title in needs]
    assert ended == ["a TestQuick", "b TestQuick"]


def test_a_sample_ends_with_its_time(soak, monkeypatch):
    needs = {f"a Test{i}": 3600 for i in range(99)}
    tried, ended = attempts(soak, monkeypatch, needs, {}, 120, list(needs))
    assert len(tried) == 6
    assert ended == []


def test_the_commit_picks_and_packages_take_turns(soak):
    tests = made(soak, *(f"{package} Test{i}" for package in "abc" for i in range(5)))
    one, other = soak.in_turns(tests, "1"), soak.in_turns(tests, "2")
    assert set(one) == set(other) == set(tests)
    assert one != other
    assert one == soak.in_turns(tests, "1")
    assert all({test.package for test in one[i : i + 3]} == {"./a", "./b", "./c"} for i in range(0, 15, 3))


def test_seconds_of_the_table(soak):
    rows = "| host TestA | 1 \\| 2; 3 | abc | 2026-11-22 | 12.5 |\n| x TestB | passed | abc | 2026-11-22 | 3 |\n"
    assert soak.known_seconds("text\n" + soak.MARK + soak.TABLE + rows) == {"host TestA": 12.5, "x TestB": 3.0}


@pytest.mark.parametrize(("ended", "status"), [([], 3), ([True], 0), ([True, False], 1)])
def test_a_sample_without_a_result_is_an_error(soak, monkeypatch, ended, status):
    tests = made(soak, "a TestA", "a TestB")
    monkeypatch.setattr(soak, "soaked", lambda: ["./a", "./b", "./c", "./d"])
    compiled = []
    monkeypatch.setattr(soak, "compile_tests", lambda folder, packages: compiled.extend(packages) or tests)
    answers = iter([*ended, None, None])
    monkeypatch.setattr(soak, "run", lambda test, limit, log: (next(answers), []))
    assert soak.sampled("rev", 120) == status
    assert len(compiled) == soak.SAMPLED


def test_rows_have_no_folders_of_this_machine(soak):
    temporary = pathlib.Path(soak.tempfile.gettempdir()) / "TestSkew1" / "017" / "kvport-store"
    logged = ["", f"plugin {temporary}: a version | too old", f"in {soak.ROOT / 'bin' / 'kvport'}"]
    assert soak.told(logged) == "plugin kvport-store: a version \\| too old; in kvport"
    assert soak.told([f'/x{temporary} and ["{temporary}","{temporary}"]']) == f'/x{temporary} and ["kvport-store","kvport-store"]'
    assert soak.told([""]) == "passed"


def test_packages_whose_tests_count_by_the_rig_are_soaked(soak):
    tests = [path for path in soak.ROOT.rglob("*_test.go") if ".deps" not in path.parts]
    users = {"./" + str(path.parent.relative_to(soak.ROOT)) for path in tests if '/verify/acceptance/rig"' in path.read_text()}
    assert "./plugins/lmcache" in users
    assert users <= set(soak.soaked())


def test_what_stays_inconclusive_is_red(soak, monkeypatch):
    monkeypatch.setenv("KVPORT_MAY_BE_INCONCLUSIVE", "1")
    environment = soak.environment(soak.STATE / "rev")
    assert "KVPORT_MAY_BE_INCONCLUSIVE" not in environment
    assert environment["KVPORT_SOAK"] == "1"
    assert environment["KVPORT_SOAK_STATE"] == str(soak.STATE / "rev")
