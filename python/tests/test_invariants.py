"""docs/spec/vllm-invariants.md and the tests that it names say the same."""

import pathlib
import re

import golden
import wrong_shims
from judge import RULES
from player import ELSEWHERE, LEFT_TO_VLLM, Player

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "spec" / "vllm-invariants.md").read_text(encoding="utf-8")


def rows(columns):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    return [(int(cells[0]), *cells[1:]) for cells in lines if len(cells) == columns and cells[0].isdigit()]


def defines(folder, name):
    return any(
        re.search(rf"^(func|def) {re.escape(name)}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        for pattern in ("*_test.go", "test_*.py")
        for path in (ROOT / folder).glob(pattern)
    )


def test_every_invariant_says_what_checks_it():
    table = rows(5)
    assert [n for n, *_ in table] == list(range(1, 69))
    replayed, named, nowhere = set(), 0, 0
    for n, text, duty, check, why in table:
        assert text and duty in ("engine", "shim", "host", "plugin", "contract"), n
        folder, _, name = check.partition(" ")
        if folder == "replay":
            replayed.add(int(name or n))
        elif check == "-":
            assert why, f"row {n}: why is it not checked?"
            nowhere += 1
        else:
            assert defines(folder, name), f"row {n}: there is no {name} in {folder}"
            named += 1
    assert replayed == set(RULES)
    print(f"\n68 invariants: {len(replayed)} rules of the replay, {named} by other tests, {nowhere} not checkable here")


def test_every_rule_has_a_wrong_shim():
    assert {w.number for w in wrong_shims.ALL} == set(RULES)


def test_every_planted_violation_has_become_a_wrong_shim_or_says_why_not():
    table = rows(4)
    assert len(table) == 57
    wrong = [(n, name) for n, _, name, why in table if name != "-"]
    assert sorted(wrong) == sorted((w.number, w.name) for w in wrong_shims.ALL)
    assert all((name == "-") == bool(why) for _, _, name, why in table)
    print(f"\n57 planted violations: {len(wrong)} wrong shims, {57 - len(wrong)} that only vLLM could cause")


def test_every_call_is_documented():
    page = set(re.findall(r"^\| `(\w+)` \| .+ \|$", PAGE, re.MULTILINE))
    assert page == golden.SCHEDULER | golden.WORKER
    left = set(re.findall(r"^\| `(\w+)` \| vLLM's base class answers", PAGE, re.MULTILINE))
    assert left == LEFT_TO_VLLM
    missing = {n for n in page - LEFT_TO_VLLM - ELSEWHERE if not hasattr(Player, n)} - {"shutdown"}
    assert not missing, f"no {sorted(missing)} is played"
