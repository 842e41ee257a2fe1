"""Runs kvport under a real SGLang on a CPU and reports what was reached, line by line: make sglang-test.

  run.py [--all] [--list] [--only LINE,...] [--seed N] [--json FILE] [--keep]

Lines run one after another, each with its own engines: those of SHORT with small counts, or with --all all of them
with full counts. SGLang's kernels have no build for CPUs: stubs/ has what is missing, which copies and computes
nothing. What transformers answers is computed in the same run. Each report is also a row for the table of
docs/sglang.md, with the commit and the load of the machine.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "vllm"))  # what both have in common

import page  # noqa: E402
import same  # noqa: E402
import trouble  # noqa: E402
from rig import ROOT, Rig, run_line  # noqa: E402
from served import Answers, Shared, setups  # noqa: E402

LINES = {
    "equal": (same.equal, "every way of a page: cold, device, host, store, a new engine; connectors and layouts: transformers' tokens"),
    "damage": (same.damaged, "100 damaged pages: transformers' tokens, all counted, mended; SGLang's own backend answers wrongly"),
    "page": (page.page, "sglang.launch_server with the command and the default deadlines of docs/sglang.md: transformers' tokens, pages found in another process"),
    "others": (same.others, "engines of another layout, page size, dtype and model on one folder: none takes another's page"),
    "weights": (same.updated, "weights changed in a running engine: its answers are those of the new ones, and no page of one is taken for the other's"),
    "engines": (same.engines, "SGLang, vLLM and kvport's engine on one folder: none is offered what another wrote; planted, it is refused"),
    "salts": (same.salted, "a page with one salt is not found with another"),
    "refused": (same.refused, "a mistake in the config ends the start before the model loads"),
    "kills": (trouble.kills, "plugin killed or stopped, agent killed, each amid a get or put that is held until then: SGLang serves, transformers' tokens"),
    "store": (trouble.store, "the store is away at the start, 4 s slow, hung, full, under each prefetch policy: bounded waits"),
    "time": (trouble.times, "exists, get and put of 18 and 180 pages beside SGLang's own file backend"),
}

TABLE = "| line | what it counted | seconds | load | commit |\n|---|---|---|---|---|\n"
# Those that use the shared engines.
USE_SHARED = {"damage", "salts", "time"}
# Those that run without --all.
SHORT = ("equal", "damage", "engines", "kills", "store")


class Options:
    """What was asked for, as the rig takes it."""

    def __init__(self, args):
        self.seed, self.keep, self.connector, self.deps, self.sglang = args.seed, args.keep, args.connector, args.vllm, args.deps
        self.all, self.scratch, self.commit = args.all, args.scratch, commit()
        self.policies = [p for p in args.policies.split(",") if p] or trouble.POLICIES[:len(trouble.POLICIES) if args.all else 1]
        self.kills, self.pairs = args.kills or (20 if args.all else 2), args.pairs or (6 if args.all else 1)
        self.shared = Shared(args.scratch)
        self.answers = Answers(sys.executable, args.baseline, pathlib.Path(args.scratch) / "transformers.log")


class Line(Rig):
    """One line: its engines, its folder, its counts."""

    @property
    def gguf(self):
        """The model as kvport's own engine reads it."""
        return next((ROOT / ".deps" / "model").glob("*.gguf"))

    def want(self, prompts, **more):
        """Give what transformers answers."""
        return self.options.answers.want(self, prompts, **more)


def stand_ins():
    """The lines of code that stand in for SGLang's kernels, for the report."""
    return {p.relative_to(HERE).as_posix(): len(p.read_text(encoding="utf-8").splitlines()) for p in sorted((HERE / "stubs").rglob("*.py"))}


def commit():
    """The commit that is tested, marked where the tree differs from it."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()

    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + ("-dirty" if git("status", "--porcelain") else "")


def run(options, name):
    """Run one line; give its report."""
    check, promise = LINES[name]
    before = os.getloadavg()[0]
    report = run_line(Line(options, name), name, promise, check, options.keep)
    report.update(commit=options.commit, before=before, after=os.getloadavg()[0], all=options.all)
    print(row(report), flush=True)
    if not report["ok"]:
        options.shared.stop()  # the next line starts its own
    return report


def row(report):
    """A report as a row of the table in docs/sglang.md: line, what it counted, seconds, load of the machine at its begin and end, commit."""
    counts = "; ".join(f"{value} {what}" if isinstance(value, int) else f"{what}: {value}" for what, value in report["counts"].items())
    counted = counts if report["ok"] else "FAILED: " + report["error"].strip().splitlines()[-1].strip()
    name = f"`{report['line']}`" + (" `--all`" if report["all"] else "")
    return f"| {name} | {counted} | {report['seconds']} | {report['before']:.1f} to {report['after']:.1f} | {report['commit']} |"


def main():
    """Run all lines, or those asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all lines with full counts")
    parser.add_argument("--list", action="store_true", help="show the lines, and run nothing")
    parser.add_argument("--only", default="", help="lines, with commas: " + ", ".join(LINES))
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and of everything random")
    parser.add_argument("--pairs", type=int, default=0, help="turns of a timed comparison; 0: 1, with --all 6")
    parser.add_argument("--kills", type=int, default=0, help="of the plugin; 0: 2, with --all 20")
    parser.add_argument("--policies", default="", help="of the lines store and kills; default: the first, with --all " + ", ".join(trouble.POLICIES))
    parser.add_argument("--connector", default="", help="only these, with commas")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / ".deps" / "sglang-test.json", help="file for the results")
    parser.add_argument("--deps", type=pathlib.Path, default=ROOT / ".deps" / "sglang", help="where sglang_setup.py put SGLang")
    parser.add_argument("--vllm", type=pathlib.Path, default=ROOT / ".deps" / "vllm", help="where vllm_setup.py put vLLM")
    parser.add_argument("--baseline", type=pathlib.Path, help="file that keeps transformers' answers between runs, for development")
    parser.add_argument("--keep", action="store_true", help="keep the folders with logs")
    args = parser.parse_args()
    args.deps, args.vllm = args.deps.absolute(), args.vllm.absolute()
    names = [n for n in args.only.split(",") if n] or list(LINES if args.all or args.list else SHORT)
    if unknown := [n for n in names if n not in LINES]:
        parser.error(f"no such line: {', '.join(unknown)}")
    if unknown := [c for c in args.connector.split(",") if c and c not in setups()]:
        parser.error(f"no connector of these tests: {', '.join(unknown)}; there are {', '.join(sorted(setups()))}")
    if unknown := [p for p in args.policies.split(",") if p and p not in trouble.POLICIES]:
        parser.error(f"no such policy: {', '.join(unknown)}")
    if args.list:
        for name in names:
            print(f"{name}{'' if name in SHORT else ' (with --all)'}: {LINES[name][1]}")
        print("connectors: " + ", ".join(sorted(setups())))
        return 0
    args.scratch = tempfile.mkdtemp(prefix="kvport-sglang-")
    os.environ["XDG_RUNTIME_DIR"] = args.scratch  # short, private and gone afterwards
    print("stand-ins for SGLang's kernels, which only copy, and the log of calls, in lines:", stand_ins())
    options, reports, begun = Options(args), [], time.monotonic()
    for at, name in enumerate(names):
        reports.append(run(options, name))
        if not USE_SHARED.intersection(names[at + 1:]):
            options.shared.stop()  # SGLang does not start where others have the memory
        seconds = round(time.monotonic() - begun)
        args.json.write_text(json.dumps({"seed": args.seed, "seconds": seconds, "stand_ins": stand_ins(), "lines": reports}, indent=1), encoding="utf-8")
    options.shared.stop()
    options.answers.stop()
    print("\n" + TABLE + "\n".join(map(row, reports)))
    failed = [r["line"] for r in reports if not r["ok"]]
    print(f"\n{len(reports) - len(failed)} of {len(reports)} lines hold" + (f"; failed: {', '.join(failed)}" if failed else "") +
          f"; {seconds // 60} min {seconds % 60} s; results in {args.json}")
    if not failed and not args.keep:
        shutil.rmtree(args.scratch, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
