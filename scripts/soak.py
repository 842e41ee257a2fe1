"""Runs the tests that have a full count, with it, in parts.

    scripts/soak.py --part 3/12     # one part; at most 45 minutes, then the same command goes on
    scripts/soak.py --sample 120    # some tests, picked by the commit, for at most 120 seconds

Run through `make soak PART=n/N`. Every test runs as a process of its own with KVPORT_SOAK=1. What has ended is
kept in .deps/soak/COMMIT, so that a part that was interrupted goes on where it was; remove that folder to begin
again. A part writes the counts of each test that passed, and the commit, into the table at the end of
docs/acceptance.md, in the place of what an earlier run of that test wrote.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
STATE = ROOT / ".deps" / "soak"
PAGE = ROOT / "docs" / "acceptance.md"
TABLE = "| test | counts | commit | date | seconds |\n|---|---|---|---|---|\n"
MARK = "<!-- soak -->\n"
LIMIT = 45 * 60  # seconds of one call
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

    def place(self, seed):
        """Orders tests: the same for one seed, unlike for another."""
        return hashlib.sha256(f"{seed} {self.title()}".encode()).digest()


def git(*arguments):
    """One line or more of git's output."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit():
    """The commit, marked where the tree differs from it by more than the page that this script writes."""
    changed = [line for line in git("status", "--porcelain").splitlines() if not line.endswith("docs/acceptance.md")]
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


def soaked():
    """The packages in which a test reads KVPORT_SOAK, by itself or through the rig of acceptance tests."""
    reads = re.compile(r"KVPORT_SOAK|\brig\.Count\(")
    found = {path.parent for path in ROOT.rglob("*_test.go") if ".deps" not in path.parts and reads.search(path.read_text())}
    return sorted("./" + str(folder.relative_to(ROOT)) for folder in found)


def compile_tests(folder):
    """Every test with a full count."""
    tests = []
    folder.mkdir(parents=True, exist_ok=True)
    packages = [(name, ()) for name in soaked() if name not in FAULTED] + [(name, FAULT_TAGS) for name in FAULTED]
    for package, tags in packages:
        binary = folder / (package.removeprefix("./").replace("/", "-") + ".test")
        subprocess.run(["go", "test", "-c", *tags, "-o", str(binary), package], cwd=ROOT, check=True)
        listed = subprocess.run([str(binary), "-test.list", "^Test"], cwd=ROOT / package, check=True, capture_output=True, text=True)
        tests += [Test(package, name, binary) for name in listed.stdout.split() if name.startswith("Test") and name != "TestMain"]
    if not tests:
        raise SoakError("no test reads KVPORT_SOAK")
    return tests


def run(test, seconds, log):
    """Whether a test passed, None where its time was over first, and the lines it logged."""
    command = [str(test.binary), "-test.run", f"^{test.name}$", "-test.v", f"-test.timeout={LIMIT + 60}s"]
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=ROOT / test.package, stdout=out, stderr=subprocess.STDOUT,
                                   env={**os.environ, "KVPORT_SOAK": "1"}, start_new_session=True)
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


def publish(rows):
    """Puts rows into the table of docs/acceptance.md, in the place of older ones of the same tests."""
    text = PAGE.read_text()
    if MARK not in text:
        raise SoakError(f"docs/acceptance.md has no line {MARK.strip()}")
    head, tail = text.split(MARK, 1)
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in tail.splitlines()[2:] if line.startswith("| ")}
    for row in rows:
        counts = "; ".join(row["logged"]).replace("|", "\\|") or "passed"
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
            passed, logged = run(test, left, folder / (test.binary.stem + "-" + test.name + ".log")) if left > 1 else (None, [])
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--sample", type=int, metavar="SECONDS")
    args = parser.parse_args()
    rev = commit()
    n, of = part_of(args.part)
    folder = STATE / (f"{rev}-sample" if args.sample else rev)
    tests = compile_tests(folder)
    tests.sort(key=lambda test: test.place(rev if args.sample else ""))
    results, left = soak(tests[n - 1 :: of], args.sample or LIMIT, folder, rev)
    failed = [row for row in results if not row["passed"]]
    for row in failed:
        print(f"soak: FAILED {row['test']}; its output is in {folder.relative_to(ROOT)}")
    if not args.sample:
        publish([row for row in results if row["passed"]])
    print(f"soak: {len(results) - len(failed)} passed, {len(failed)} failed, {len(left)} not run")
    if left and not args.sample:
        print(f"soak: the same command goes on with {left[0].title()}")
    return 1 if failed else 3 if left and not args.sample else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SoakError, subprocess.CalledProcessError) as err:
        print(f"soak: {err}", file=sys.stderr)
        sys.exit(2)
