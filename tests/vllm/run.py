"""Runs kvport under a real vLLM and reports what was reached, line by line: make vllm-test.

  run.py [--list] [--only LINE,...] [--seed N] [--prompts N] [--json FILE] [--keep]

Lines run one after another, each with its own engines: at most one prefill and one decode engine at a time (and
LMCache's beside them where it is compared with). What vLLM answers without a connector is computed in the same run.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

import client
import connectors
import equal
import events
import faults
import layers
import lookups
import memory
import pressure
import timing
from rig import ROOT, Engine, Result, Rig, run_line

LINES = {
    "connectors": (equal.connectors, "every connector: cold, warm, second turn and a later process give vLLM's own tokens"),
    "together": (equal.together, "the same with four requests at a time"),
    "pd": (equal.disaggregated, "prefill and decode in two engines: vLLM's own tokens"),
    "serve": (equal.served, "`vllm serve` in several processes: cold, warm, second turn give vLLM's own tokens"),
    "route": (equal.routed, "two `vllm serve` behind `kvport route` and behind vLLM's own kind of proxy: vLLM's own tokens"),
    "events": (events.events, "two `vllm serve` behind `kvport route`, prefix_aware by KV events: vLLM's own tokens, hits where predicted"),
    "client": (client.client, "`vllm bench serve` sends 200 requests to `kvport serve`, prefill and decode, behind `kvport route`: none fails"),
    "ttft": (timing.ttft, "an external hit of 1,350 tokens against vLLM's own prefix-cache hit and LMCache, in alternation"),
    "zerocopy": (memory.shared, "a third process maps the same memory as vLLM and the plugin and sees the blocks"),
    "steps": (timing.steps, "what the hooks add to a step without a transfer"),
    "lookups": (lookups.lookups, "what vLLM's scheduler waits for lookups of 1, 8 and 64 requests that wait, hits in memory, beside an empty frame to the agent"),
    "kills": (faults.kills, "plugin killed or stopped, agent killed, under four requests: vLLM lives, vLLM's own tokens"),
    "damage": (faults.damage, "loads that fail, all kinds, both policies: vLLM's own tokens or a clean error, never a loop"),
    "layers": (layers.layers, "attention waits for the layers of a load one by one, a damaged one too: vLLM's own tokens"),
    "isa": (faults.isa, "prefill on another kernel ISA: refused with the reason"),
    "pressure": (pressure.pressure, "66 blocks, preemptions, aborts, aborts of loading requests: no block is lost, the engine is idle"),
    "ranks": (pressure.ranks, "three ranks of tensor parallelism: vLLM's own tokens"),
}

# What a line runs with; the others run with one store of files.
SELECTS = {"connectors": connectors.alone, "together": connectors.alone, "pd": connectors.apart,
           "route": connectors.line("route"), "client": connectors.handover, "ttft": connectors.line("ttft"), "layers": connectors.line("layers"),
           "lookups": connectors.line("lookups")}


def show(options, names):
    """The lines with the connectors that each would run, for --list."""
    for name in names:
        found, unknown = connectors.chosen(options, SELECTS.get(name, connectors.typical))
        print(f"{name}: {', '.join(f'{s.label} ({s.connector})' for s in found)}")
    for connector in unknown:
        print(f"{connector} has no fixture.json and is left out")


class Options:
    """What was asked for, and the answers of vLLM alone, which all lines share."""

    def __init__(self, args):
        self.seed, self.prompts, self.keep, self.connector, self.deps = args.seed, args.prompts, args.keep, args.connector, args.deps
        self.pairs, self.kills, self.scratch = args.pairs, args.kills, args.scratch
        self.known, self.file = {}, args.baseline
        if self.file and self.file.exists():
            self.known = {tuple(map(int, k.split())): v for k, v in json.loads(self.file.read_text()).items()}

    def baseline(self, prompts, tokens, **engine):
        """What vLLM without a connector answers, token for token; with `engine`, one made so."""
        if engine:
            return self.compute(prompts, tokens, engine)
        missing = [p for p in prompts if len(self.known.get(tuple(p), ())) < tokens]
        if missing:
            for p, r in zip(missing, self.compute(missing, tokens, {})):
                self.known[tuple(p)] = list(r.ids)
            if self.file:
                self.file.write_text(json.dumps({" ".join(map(str, k)): v for k, v in self.known.items()}))
        return [Result(ids=self.known[tuple(p)][:tokens], finish="length") for p in prompts]

    def compute(self, prompts, tokens, engine):
        """Run them on an engine without a connector."""
        rig = Rig(self, "baseline")
        try:
            return Engine(rig, "alone", **engine).all(prompts, tokens)
        finally:
            rig.close(self.keep)


def run(options, name):
    """One line; its report."""
    check, promise = LINES[name]
    return run_line(Rig(options, name), name, promise, check, options.keep)


def main():
    """All lines, or those asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show the lines and what each runs with, and run nothing")
    parser.add_argument("--only", default="", help="lines, with commas: " + ", ".join(LINES))
    parser.add_argument("--seed", type=int, default=1, help="of the prompts and of everything random")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=24, help="pairs of a timed comparison")
    parser.add_argument("--kills", type=int, default=30, help="of the plugin")
    parser.add_argument("--connector", default="", help="only these, with commas")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / ".deps" / "vllm-test.json", help="file for the results")
    parser.add_argument("--deps", type=pathlib.Path, default=ROOT / ".deps" / "vllm", help="where vllm_setup.py put vLLM")
    parser.add_argument("--baseline", type=pathlib.Path, help="file that keeps vLLM's own answers between runs, for development")
    parser.add_argument("--keep", action="store_true", help="keep the folders with logs")
    args = parser.parse_args()
    args.deps = args.deps.absolute()
    names = [n for n in args.only.split(",") if n] or list(LINES)
    if unknown := [n for n in names if n not in LINES]:
        parser.error(f"no such line: {', '.join(unknown)}")
    if args.list:
        show(args, names)
        return 0
    args.scratch = tempfile.mkdtemp(prefix="kvport-vllm-")
    os.environ["XDG_RUNTIME_DIR"] = args.scratch  # short, private and gone afterwards
    options, reports, begun = Options(args), [], time.monotonic()
    for name in names:
        reports.append(run(options, name))
        seconds = round(time.monotonic() - begun)
        args.json.write_text(json.dumps({"seed": args.seed, "seconds": seconds, "lines": reports}, indent=1), encoding="utf-8")
    failed = [r["line"] for r in reports if not r["ok"]]
    print(f"\n{len(reports) - len(failed)} of {len(reports)} lines hold" + (f"; failed: {', '.join(failed)}" if failed else "") +
          f"; {seconds // 60} min {seconds % 60} s; results in {args.json}")
    if not failed and not args.keep:
        shutil.rmtree(args.scratch, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
