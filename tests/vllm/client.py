"""A line about vLLM's own load generator: `vllm bench serve` as a client of `kvport route`."""

import json
import pathlib
import subprocess
import sys

from rig import ROOT, Server, environment, free_port, tail

from connectors import configs, handover

REQUESTS = 200
RATE = 2  # a second; both clients draw the times from a Poisson process
PROMPT = 64, 192  # tokens, drawn evenly
ANSWER = 16, 48


def client(rig):
    """A prefill and a decode engine of kvport behind its router: vLLM's client sends its requests, then kvport's sends as many of the same lengths."""
    router, decode = serving(rig)
    theirs = vllm_bench(rig, router)
    rig.check(theirs["failed"] == 0 and theirs["completed"] == REQUESTS,
              f"vLLM's client: {theirs['completed']} of {REQUESTS} requests were answered, {theirs['failed']} failed: {set(theirs['errors'])}")
    low, high = ANSWER
    wrong = [n for n in theirs["output_lens"] if not low <= n <= high]
    rig.check(not wrong, f"vLLM's client asked for answers of {low} to {high} tokens and got {wrong}")
    rig.count("requests of vLLM's client", theirs["completed"])
    rig.count("failed", theirs["failed"])
    rig.count("tokens answered", sum(theirs["output_lens"]))
    loaded = int(decode.counter("kvport_prompt_tokens_total", 'source="external"'))
    sent = sum(theirs["input_lens"])
    rig.check(loaded >= 0.5 * sent, f"the decode engine loaded {loaded} of {sent} tokens of prompts: they were not handed over")
    rig.count("tokens of prompts", sent)
    rig.count("external tokens", loaded)
    ours = kvport_bench(rig, router)
    rig.check(ours["answered"] == REQUESTS, f"kvport's client: {ours['answered']} of {REQUESTS} requests were answered")
    compare(rig, theirs, ours)


def serving(rig):
    """The router's server, and the decode engine's."""
    found = configs(rig, handover)
    rig.check(found, "no connector that was asked for is the typical one between a prefill and a decode engine")
    setup, extra = found[0]
    servers = []
    for role in "kv_producer", "kv_consumer":
        config = {"kv_connector": setup.connector, "kv_role": role, "kv_connector_extra_config": extra}
        servers.append(start(rig, f"{setup.folder}-{role}", "serve", "--model", str(ROOT / ".deps" / "model" / "SmolLM2-135M-Instruct.Q4_1.gguf"),
                             "--served-model-name", "m", "--threads", "1", "--weight-cache=false", "--kv-transfer-config", json.dumps(config)))
    p, d = servers
    return start(rig, "router", "route", "--prefill", p.url, "--decode", d.url), d


def start(rig, name, *command):
    """A process of kvport with an HTTP port."""
    port = free_port()
    return Server(rig, name, [str(ROOT / "bin" / "kvport"), *command, "--port", str(port)], port)


def around(bounds):
    """The middle of a range, and how far its ends lie from it, as a share of the middle: vLLM's client takes ranges in this form."""
    middle = sum(bounds) / 2
    return int(middle), (bounds[1] - middle) / middle


def vllm_bench(rig, router):
    """What `vllm bench serve` measures."""
    (prompt, prompt_ratio), (answer, answer_ratio) = around(PROMPT), around(ANSWER)
    vllm = pathlib.Path(sys.executable).parent / "vllm"
    execute(rig, "vllm-bench", [
        sys.executable, str(vllm), "bench", "serve", "--backend", "openai", "--base-url", router.url, "--endpoint", "/v1/completions", "--model", "m",
        "--tokenizer", str(rig.model), "--dataset-name", "random", "--random-input-len", str(prompt), "--random-output-len", str(answer),
        "--random-range-ratio", json.dumps({"input": prompt_ratio, "output": answer_ratio}), "--num-prompts", str(REQUESTS), "--request-rate", str(RATE),
        "--seed", str(rig.options.seed), "--ignore-eos", "--temperature", "0", "--percentile-metrics", "ttft,itl,e2el", "--metric-percentiles", "50,99",
        "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", str(rig.folder), "--result-filename", "vllm.json"])
    return json.loads((rig.folder / "vllm.json").read_text(encoding="utf-8"))


def kvport_bench(rig, router):
    """What `kvport bench serve` measures of the same server, by the names of its rows."""
    workload = {"requests": REQUESTS, "rate": RATE, "system_prompts": 1, "system_tokens": {"min": 0, "max": 0}, "turns": {"min": 1, "max": 1}, "long_share": 0,
                "short_tokens": dict(zip(("min", "max"), PROMPT)), "answer_tokens": dict(zip(("min", "max"), ANSWER))}
    path = rig.folder / "workload.json"
    path.write_text(json.dumps(workload), encoding="utf-8")
    text = execute(rig, "kvport-bench", [str(ROOT / "bin" / "kvport"), "bench", "serve", "--url", f"router={router.url}", "--vllm-fields", "--rounds", "1",
                                         "--seed", str(rig.options.seed), "--workload", str(path), "--format", "json"])
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["name"].removeprefix("router: "): row["value"] for row in rows}


def execute(rig, name, command):
    """What a program prints, once it has ended well."""
    log = rig.folder / f"{name}.log"
    with open(log, "w", encoding="utf-8") as err:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment(), cwd=rig.folder, timeout=1200, check=False)
    rig.check(done.returncode == 0, f"{name} ended with {done.returncode}:\n{tail(log)}")
    rig.say(f"{name} done")
    return done.stdout


def compare(rig, theirs, ours):
    """Put the numbers of both clients side by side. They are of two runs, one after the other, and not compared by the test."""
    for name, key in ("TTFT", "ttft"), ("ITL", "itl"), ("E2E", "e2el"):
        for q in "p50", "p99":
            rig.notes.append(f"{name} {q}: vLLM's client {theirs[f'{q}_{key}_ms']:.1f} ms, kvport's {ours[f'{name} {q}']:.1f} ms")
    rig.notes.append(f"token/s: vLLM's client {theirs['output_throughput']:.1f}, kvport's {ours['answers']:.1f}")
