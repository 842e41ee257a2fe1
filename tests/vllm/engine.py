"""One vLLM engine in one process, driven by JSON lines: the form of vLLM that the tests use most.

It is vLLM's own LLMEngine with scheduler and worker in this process, which starts in a third of the
time of `vllm serve` and runs the same code of scheduler, worker and connector.

argv[1]: {"kv": KV transfer config or null, "engine": {field of EngineArgs: value}, "isa": "" or the
attention kernel to force, "hide": "" or modules to keep away from vLLM's search for kernels}

Calls, one JSON object a line on stdin; answers and results on stdout:
  {"op": "add", "id", "ids": [token], "max": n, "kvp": kv_transfer_params}   -> a result when it ends
  {"op": "together", "adds": [add]}   -> their results: no step begins before all of them wait
  {"op": "abort", "id"}      -> {"aborted": id}
  {"op": "reset"}            -> {"reset": true}: the engine's own prefix cache is empty
  {"op": "metrics"}          -> {"metrics": {name or name:label,label: value}}
  {"op": "pool"}             -> {"pool": {...}}: blocks in use, requests and what the scheduler holds
  {"op": "hooks", "on": b}   -> {"hooks": {...}}: what was measured since it was last switched on
  {"op": "empty", "n", "after": s}   -> {"empty": [s]}: times of calls that ask the agent nothing, each after so much other work
  {"op": "agent"}            -> {"agent": {name: [count, sum] or value}}: the agent's metrics as far as it has told them
  {"op": "memory"}           -> {"memory": {"base": address, "bytes": n, "segment": bytes of one layer's part of a block}}
  {"op": "peek", "n"}        -> {"peek": hex}: the cache's first bytes as vLLM's tensor has them
  {"op": "quit"}
A result: {"id", "ids", "ttft", "latency" (s), "cached", "finish", "kvp"}.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever prints goes to the log


def tell(answer):
    """Write one answer."""
    answers.write(json.dumps(answer, default=str) + "\n")


class Hooks:
    """Time spent in the connector's hooks, step by step; the innermost call of a nest counts once."""

    def __init__(self):
        self.on, self.depth, self.steps = False, 0, []
        self.clear()

    def clear(self):
        """Begin a step."""
        self.seconds, self.calls, self.names, self.messages = 0.0, 0, {}, []

    def wrap(self, owner):
        """Measure every public method of a connector."""
        for name in dir(type(owner)):
            plain = getattr(owner, name, None) if not name.startswith("_") else None
            if callable(plain) and not isinstance(getattr(type(owner), name), (property, classmethod)):
                setattr(owner, name, self.measured(name, plain))

    def measured(self, name, plain):
        """A method that counts its calls and time."""

        def call(*args, **kwargs):
            if not self.on or self.depth:
                return plain(*args, **kwargs)
            self.depth += 1
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.depth -= 1
                self.seconds += took
                self.calls += 1
                n, s = self.names.get(name, (0, 0.0))
                self.names[name] = (n + 1, s + took)

        return call

    def questions(self, link):
        """Measure every message with questions to the agent: its time, and how much of that this thread computes."""
        plain = link.call

        def call(timeout, **fields):
            if not self.on or "match" not in fields:
                return plain(timeout, **fields)
            computed, start = time.thread_time(), time.perf_counter()
            answer = plain(timeout, **fields)
            took = time.perf_counter() - start
            self.messages.append((took, time.thread_time() - computed, fields, answer))
            return answer

        link.call = call

    def step(self, seconds, tokens):
        """Note one engine step and begin the next."""
        if self.on:
            self.steps.append({"step": seconds, "hooks": self.seconds, "calls": self.calls, "tokens": tokens, "names": self.names,
                               "messages": [described(*m) for m in self.messages]})
        self.clear()


def described(took, computed, fields, answer):
    """What a message asked, in numbers, and what was found: of requests with an offer."""
    asked = [fields["match"], *fields.get("ahead", ())]
    found = [] if answer is None else [answer.match, *answer.ahead]
    return {"seconds": took, "computed": computed, "requests": len(asked), "keys": sum(len(q.keys) for q in asked) // 32,
            "hits": sum(m.tokens > 0 for m in found), "unanswered": len(asked) - sum(not m.later for m in found)}


def hide(prefix):
    """Keep vLLM's search for kernels out of modules that it stumbles over: llvmlite's, which LMCache imports early."""
    from vllm.triton_utils import dispatcher

    plain = dispatcher._rebind_kernels

    def search(overrides):
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(prefix)}
        try:
            plain(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = search


class Driver:
    """The engine and its open requests."""

    def __init__(self, config):
        from vllm import EngineArgs, LLMEngine

        if config.get("isa"):
            from vllm.v1.attention.backends import cpu_attn

            cpu_attn._get_attn_isa = lambda *_a, **_k: config["isa"]
        if config.get("hide"):
            hide(config["hide"])
        args = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True, "block_size": 32,
                "kv_transfer_config": config.get("kv"), "disable_log_stats": False}
        args.update(config["engine"])
        self.engine = LLMEngine.from_engine_args(EngineArgs(**args))
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.live, self.calls, self.hooks = {}, queue.Queue(), Hooks()
        if config.get("kv"):
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.hooks.wrap(self.scheduler.connector)
            self.hooks.wrap(get_kv_transfer_group())
            if side := getattr(self.scheduler.connector, "scheduler", None):  # kvport's
                self.hooks.questions(side.link)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        """Pass the calls on."""
        for line in sys.stdin:
            self.calls.put(json.loads(line))
        self.calls.put({"op": "quit"})

    def add(self, call):
        """Begin a request."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=call["max"], ignore_eos=True,
                                extra_args={"kv_transfer_params": call["kvp"]} if call.get("kvp") else None)
        self.live[call["id"]] = [time.perf_counter(), None]
        prompt = {"prompt_token_ids": call["ids"]}
        if call.get("salt"):
            prompt["cache_salt"] = call["salt"]
        self.engine.add_request(call["id"], prompt, params)

    def together(self, call):
        """Begin requests that all wait before the next step."""
        for add in call["adds"]:
            self.add(add)

    def abort(self, call):
        """End a request early."""
        self.engine.abort_request([call["id"]])
        self.live.pop(call["id"], None)
        tell({"aborted": call["id"]})

    def reset(self, _call):
        """Empty the engine's own prefix cache, which works only when no block is in use."""
        tell({"reset": self.engine.reset_prefix_cache()})

    def metrics(self, _call):
        """All counters and gauges that vLLM and the connector show on /metrics, by name and labels."""
        from prometheus_client import REGISTRY

        values = {}
        for family in REGISTRY.collect():
            for s in family.samples:
                labels = ",".join(v for k, v in sorted(s.labels.items()) if k not in ("engine", "model_name"))
                if s.name.startswith(("vllm:", "kvport")) and not s.name.endswith(("_bucket", "_created")):
                    values[s.name + (":" + labels if labels else "")] = s.value
        tell({"metrics": values})

    def pool(self, _call):
        """How every block and request is accounted for."""
        pool = self.scheduler.kv_cache_manager.block_pool
        used = [b.block_id for b in pool.blocks if b.ref_cnt > 0 and not b.is_null]
        tell({"pool": {"blocks": pool.num_gpu_blocks, "free": pool.get_num_free_blocks(), "used": len(used), "ids": used[:20],
                       "refs": sum(b.ref_cnt for b in pool.blocks if not b.is_null), "requests": len(self.scheduler.requests),
                       "has_requests": self.scheduler.has_requests(), "idle": not self.engine.has_unfinished_requests()}})

    def caches(self):
        """The storage of all layers' caches."""
        runner = self.core.model_executor.driver_worker.worker.model_runner
        return runner.kv_caches[0]

    def memory(self, _call):
        """Where the paged cache lies."""
        first = self.caches()
        storage = first.untyped_storage()
        tell({"memory": {"base": storage.data_ptr(), "bytes": storage.nbytes(), "segment": first[0].numel() * first.element_size()}})

    def peek(self, call):
        """The first bytes of the cache, read through vLLM's tensor."""
        import torch

        tell({"peek": bytes(self.caches().flatten().view(torch.uint8)[:call["n"]].tolist()).hex()})

    def measure(self, call):
        """Hand out what was measured, and switch."""
        tell({"hooks": self.hooks.steps})
        self.hooks.steps, self.hooks.on = [], call["on"]

    def empty(self, call):
        """Time calls that ask nothing. Other work is as much of a thread's time with 16 MiB of memory."""
        import torch
        from kvport_agent.messages import message

        link, other, times = self.scheduler.connector.scheduler.link, torch.zeros(4 << 20), []
        for _ in range(call["n"]):
            end = time.perf_counter() + call["after"]
            while time.perf_counter() < end:
                other.add_(1)
            start = time.perf_counter()
            link.call(1, match=message("Query")())
            times.append(time.perf_counter() - start)
        tell({"empty": times})

    def agent(self, _call):
        """What the agent has counted, summed over labels."""
        side, totals = self.scheduler.connector.scheduler, {}
        side.poll()
        for c in side.link.agent_state.counters if side.link.agent_state else ():
            if c.HasField("histogram"):
                count, total = totals.get(c.name, (0, 0.0))
                totals[c.name] = (count + sum(c.histogram.counts), total + c.histogram.sum)
            else:
                totals[c.name] = totals.get(c.name, 0) + c.value
        tell({"agent": totals})

    def quit(self, _call):
        """Shut the engine down as vLLM does."""
        with contextlib.suppress(Exception):
            self.engine.engine_core.shutdown()
        tell({"bye": True})
        answers.flush()
        os._exit(0)

    def run(self):
        """Serve calls, and step while there is anything to do."""
        ops = {"add": self.add, "together": self.together, "empty": self.empty, "agent": self.agent, "abort": self.abort, "reset": self.reset, "metrics": self.metrics, "pool": self.pool,
               "hooks": self.measure, "memory": self.memory, "peek": self.peek, "quit": self.quit}
        while True:
            busy = self.engine.has_unfinished_requests() or self.scheduler.has_requests()
            try:
                while True:
                    call = self.calls.get(block=not busy)
                    ops[call["op"]](call)
                    busy = True
            except queue.Empty:
                pass
            self.step()

    def step(self):
        """One step of the engine, its results, and vLLM's own pause when nothing was computed."""
        start = time.perf_counter()
        outputs = self.engine.step()
        self.hooks.step(time.perf_counter() - start, len(outputs))
        for o in outputs:
            times = self.live.get(o.request_id)
            if times is None:
                continue
            now = time.perf_counter()
            if times[1] is None and o.outputs and o.outputs[0].token_ids:
                times[1] = now - times[0]
            if o.finished:
                del self.live[o.request_id]
                tell({"id": o.request_id, "ids": list(o.outputs[0].token_ids), "ttft": times[1], "latency": now - times[0],
                      "cached": o.num_cached_tokens, "finish": o.outputs[0].finish_reason, "kvp": o.kv_transfer_params})
        if not outputs and self.scheduler.has_requests():
            time.sleep(0.001)


if __name__ == "__main__":
    begun = time.time()
    driver = Driver(json.loads(sys.argv[1]))
    tell({"ready": time.time() - begun, "pid": os.getpid()})
    driver.run()
