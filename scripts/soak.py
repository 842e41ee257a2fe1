"""Runs the tests that have a full count, with it, in parts.

    scripts/soak.py --part 3/12     # one part; at most 45 minutes, then the same command goes on
    scripts/soak.py --sample 120    # some tests, picked by the commit, which run for at most 120 seconds

Run through `make soak PART=n/N`. Every test runs as a process of its own with KVPORT_SOAK=1. What has ended is
kept in .deps/soak/COMMIT, so that a part that was interrupted goes on where it was; remove that folder to begin
again. A test of hours, such as TestSeeds of verify/acceptance, keeps there how far it has come. A part writes the counts of each test that passed, and the commit, into the table at the end of
docs/acceptance.md, in the place of what an earlier run of that test wrote.

A sample takes a few packages and passes over the tests that, by that table, do not fit into the time that is left.
A test without a row gets a part of the time. One that does not end in its time counts neither as passed nor as failed.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STATE = ROOT / ".deps" / "soak"
PAGE = ROOT / "docs" / "acceptance.md"
TABLE = "| test | counts | commit | date | seconds |\n|---|---|---|---|---|\n"
MARK = "<!-- soak -->\n"
LIMIT = 45 * 60  # seconds of one call
SAMPLED = 3  # packages of a sample
TRIES = 6  # a sample gives a test without a row in the table so small a part of its time
SLACK = 1.5  # a sample takes a test if this times its seconds in the table are left
FAULT_TAGS = ("-tags", "kvport_fault")
# These need failpoints, which the build tag of FAULT_TAGS puts in.
FAULTED = ("./internal/fault", "./verify/faultsuite")
LOG_LINE = re.compile(r"^\s+\w+_test\.go:\d+: (.*)$")


class SoakError(Exception):
    """A failure that the user can do something about; its text says what."""


@dataclasses.dataclass(frozen=True)
class Test:
    """One top-level test, with the program that holds it."""

    package: str
    name: str
    binary: pathlib.Path

    def title(self):
        return f"{self.package.removeprefix('./')} {self.name}"

    def log(self, folder):
        """Where the test's output goes."""
        return folder / f"{self.binary.stem}-{self.name}.log"


def place(seed, title):
    """Orders titles: the same for one seed, unlike for another."""
    return hashlib.sha256(f"{seed} {title}".encode()).digest()


def git(*arguments):
    """One line or more of git's output."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit():
    """The commit, marked where the tree differs from it by more than the page that this script writes."""
    changed = [line for line in git("status", "--porcelain").splitlines() if not line.endswith("docs/acceptance.md")]
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


def soaked():
    """The packages in which a test reads KVPORT_SOAK, those whose tests use the rig, which reads it, and those with failpoints."""
    reads = re.compile(r"KVPORT_SOAK|\brig\.(Count|New)\(")
    found = {path.parent for path in ROOT.rglob("*_test.go") if ".deps" not in path.parts and reads.search(path.read_text())}
    return sorted({"./" + str(folder.relative_to(ROOT)) for folder in found} | set(FAULTED))


def compile_tests(folder, packages):
    """Every test of the packages."""
    tests = []
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        tags = FAULT_TAGS if package in FAULTED else ()
        binary = folder / (package.removeprefix("./").replace("/", "-") + ".test")
        subprocess.run(["go", "test", "-c", *tags, "-o", str(binary), package], cwd=ROOT, check=True)
        listed = subprocess.run([str(binary), "-test.list", "^Test"], cwd=ROOT / package, check=True, capture_output=True, text=True)
        tests += [Test(package, name, binary) for name in listed.stdout.split() if name.startswith("Test") and name != "TestMain"]
    if not tests:
        raise SoakError("no test reads KVPORT_SOAK")
    return tests


def environment(folder):
    """Full counts, and verdicts: what stays inconclusive after it ran again has failed here, unlike in make test. A test that takes
    longer than a call notes in the folder how far it has come."""
    kept = {name: value for name, value in os.environ.items() if name != "KVPORT_MAY_BE_INCONCLUSIVE"}
    return {**kept, "KVPORT_SOAK": "1", "KVPORT_SOAK_STATE": str(folder)}


def run(test, seconds, log):
    """Whether a test passed, None where its time was over first, and the lines it logged."""
    command = [str(test.binary), "-test.run", f"^{test.name}$", "-test.v", f"-test.timeout={LIMIT + 60}s"]
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=ROOT / test.package, stdout=out, stderr=subprocess.STDOUT,
                                   env=environment(log.parent), start_new_session=True)
        try:
            passed = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            passed = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    logged = [m.group(1) for line in log.read_text(errors="replace").splitlines() if (m := LOG_LINE.match(line))]
    return passed, logged


def load(path):
    """What earlier calls have ended, by title."""
    if not path.exists():
        return {}
    return {(row := json.loads(line))["test"]: row for line in path.read_text().splitlines()}


def told(logged):
    """What a row says: the lines of a test, without folders of this machine."""
    folders = re.compile(rf"(?<![\w/])(?:{re.escape(tempfile.gettempdir())}|{re.escape(str(ROOT))})/(?:[\w.-]+/)*")
    return folders.sub("", "; ".join(line for line in logged if line)).replace("|", "\\|") or "passed"


def publish(rows):
    """Puts rows into the table of docs/acceptance.md, in the place of older ones of the same tests."""
    text = PAGE.read_text()
    if MARK not in text:
        raise SoakError(f"docs/acceptance.md has no line {MARK.strip()}")
    head, tail = text.split(MARK, 1)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in tail.splitlines()[2:] if line.startswith("| ")}
    for row in rows:
        counts = told(row["logged"])
        kept[row["test"]] = f"| {row['test']} | {counts} | {row['commit']} | {row['date']} | {row['seconds']} |"
    PAGE.write_text(head + MARK + TABLE + "".join(kept[test] + "\n" for test in sorted(kept)))


def part_of(text):
    """n and N of n/N."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not match or int(match[1]) > int(match[2]):
        raise SoakError(f"PART is {text}; it has the form n/N with n from 1 to N, as in PART=3/12")
    return int(match[1]), int(match[2])


def soak(tests, limit, folder, rev):
    """Runs what has not ended yet; returns the rows of all that has ended, and the tests for which no time was left."""
    done, began, results = load(folder / "results.jsonl"), time.monotonic(), []
    for i, test in enumerate(tests, 1):
        row = done.get(test.title())
        if row is None:
            left = limit - (time.monotonic() - began)
            start = time.monotonic()
            passed, logged = run(test, left, test.log(folder)) if left > 1 else (None, [])
            if passed is None:
                print(f"soak: {i}/{len(tests)} no time is left for {test.title()}", flush=True)
                return results, tests[i - 1:]
            row = {"test": test.title(), "passed": passed, "logged": logged, "commit": rev, "date": time.strftime("%Y-%m-%d"),
                   "seconds": round(time.monotonic() - start, 1)}
            with open(folder / "results.jsonl", "a") as out:
                out.write(json.dumps(row) + "\n")
        results.append(row)
        print(f"soak: {i}/{len(tests)} {'ok  ' if row['passed'] else 'FAIL'} {test.title()} {row['seconds']} s", flush=True)
        for line in row["logged"]:
            print(f"    {line}", flush=True)
    return results, []


def known_seconds(page):
    """How long each test took that has a row in the table at the end of docs/acceptance.md."""
    rows = [line.strip("| ").split(" | ") for line in page.partition(MARK)[2].splitlines()[2:] if line.startswith("| ")]
    return {row[0]: float(row[-1]) for row in rows}


def in_turns(tests, seed):
    """Puts tests into an order that the seed picks, with one of each package in turn."""
    packages = {}
    for test in sorted(tests, key=lambda test: place(seed, test.title())):
        packages.setdefault(test.package, []).append(test)
    return [test for turn in itertools.zip_longest(*packages.values()) for test in turn if test]


def sample(tests, known, seconds, attempt):
    """Gives the tests that fit into so many seconds, in order, to attempt; returns (test, passed, lines) of those that ended."""
    results, left = [], seconds
    for test in tests:
        need = known.get(test.title())
        if need is not None and need * SLACK > left:
            continue
        limit = left if need is not None else min(left, seconds / TRIES)
        if limit <= 1:
            break
        began = time.monotonic()
        passed, logged = attempt(test, limit)
        took = time.monotonic() - began
        left -= took
        print(f"soak: {'too long' if passed is None else 'ok' if passed else 'FAIL'} {test.title()} {took:.1f} s", flush=True)
        for line in logged if passed is not None else []:
            print(f"    {line}", flush=True)
        if passed is not None:
            results.append((test, passed, logged))
    return results


def sampled(rev, seconds):
    """Runs a sample; returns the exit status."""
    folder = STATE / f"{rev}-sample"
    tests = compile_tests(folder, sorted(soaked(), key=lambda package: place(rev, package))[:SAMPLED])
    results = sample(in_turns(tests, rev), known_seconds(PAGE.read_text()), seconds, lambda test, limit: run(test, limit, test.log(folder)))
    failed = [test for test, passed, _ in results if not passed]
    for test in failed:
        print(f"soak: FAILED {test.title()}; its output is in {test.log(folder).relative_to(ROOT)}")
    print(f"soak: {len(results) - len(failed)} passed, {len(failed)} failed, of {len(tests)} in the packages of the sample")
    if not results:
        print("soak: no test ended in its time: give the sample more seconds")
    return 1 if failed else 0 if results else 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--sample", type=int, metavar="SECONDS")
    args = parser.parse_args()
    rev = commit()
    if args.sample:
        return sampled(rev, args.sample)
    n, of = part_of(args.part)
    folder = STATE / rev
    tests = compile_tests(folder, soaked())
    tests.sort(key=lambda test: place("", test.title()))
    results, left = soak(tests[n - 1 :: of], LIMIT, folder, rev)
    failed = [row for row in results if not row["passed"]]
    for row in failed:
        print(f"soak: FAILED {row['test']}; its output is in {folder.relative_to(ROOT)}")
    publish([row for row in results if row["passed"]])
    print(f"soak: {len(results) - len(failed)} passed, {len(failed)} failed, {len(left)} not run")
    if left:
        print(f"soak: the same command goes on with {left[0].title()}")
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SoakError, subprocess.CalledProcessError) as err:
        print(f"soak: {err}", file=sys.stderr)
        sys.exit(2)
