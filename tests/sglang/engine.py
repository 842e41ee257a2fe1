"""SGLang's engine, all its processes, driven by JSON lines: engine.py '{argument of sglang.Engine: value}'.

Calls, one JSON object a line on stdin; answers on stdout:
  {"op": "run", "prompts": [[token]], "max": n, "salt": "" or a cache_salt}  -> {"run": [result]}, all prompts at once
  {"op": "flush"}  -> {"flush": whether the device and host caches are empty now}
  {"op": "update", "model": folder}  -> {"update": whether the engine has the weights in there now}
  {"op": "unknown"}  -> {"unknown": [arguments that kvport knows and this SGLang does not have]}
  {"op": "metrics"}  -> {"metrics": {name: the sum over all labels}}, of SGLang's page of metrics, if it has one (enable_metrics)
  {"op": "quit"}
A result: {"ids", "finish", "cached": {"device", "host", "storage": tokens}, "seconds"}.
"""

import json
import os
import sys
import time

ARGUMENTS = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
    "disable_overlap_schedule": True, "skip_server_warmup": True, "enable_cache_report": True, "log_level": "info", "random_seed": 1, "max_running_requests": 4,
    "page_size": 16, "max_total_tokens": 8192, "context_length": 4096, "mem_fraction_static": 0.6,
    "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_write_policy": "write_through",
    "hicache_mem_layout": "page_first", "hicache_io_backend": "kernel", "hicache_storage_prefetch_policy": "wait_complete",
    "sleep_on_idle": True,  # else one that waits for its turn takes a core from the others
}


def result(output, seconds):
    """What one answer shows."""
    details = output["meta_info"].get("cached_tokens_details") or {}
    cached = {tier: int(details.get(tier) or 0) for tier in ("device", "host", "storage")}
    finish = output["meta_info"].get("finish_reason") or {}
    return {"ids": output["output_ids"], "finish": finish.get("type", ""), "cached": cached, "seconds": seconds}


def run(engine, call):
    """Answer prompts, all at once."""
    begun = time.monotonic()
    more = {"cache_salt": [call["salt"]] * len(call["prompts"])} if call.get("salt") else {}
    outputs = engine.generate(input_ids=call["prompts"], sampling_params={"temperature": 0, "max_new_tokens": call["max"], "ignore_eos": True}, **more)
    return [result(o, time.monotonic() - begun) for o in outputs]


def unknown():
    """The arguments of SGLang's server that kvport thinks there are, and are not."""
    from kvport_sglang import fingerprint
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    return sorted({*fingerprint._DECIDE, *fingerprint._NEITHER} - set(namespace_of(ServerArgs)))


def metrics():
    """What SGLang's server shows at /metrics, made as it does that."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry, sums = CollectorRegistry(), {}
    multiprocess.MultiProcessCollector(registry)
    for sample in (s for metric in registry.collect() for s in metric.samples):
        sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def main():
    """Serve calls until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints goes to the log

    def tell(**answer):
        answers.write(json.dumps(answer) + "\n")

    begun = time.monotonic()
    import sglang

    engine = sglang.Engine(**{**ARGUMENTS, **json.loads(sys.argv[1])})
    tell(ready=time.monotonic() - begun)
    for line in sys.stdin:
        call = json.loads(line)
        if call["op"] == "quit":
            break
        if call["op"] == "run":
            tell(run=run(engine, call))
        if call["op"] == "flush":
            tell(flush=bool(getattr(engine.flush_cache(), "success", False)))
        if call["op"] == "update":
            tell(update=bool(engine.update_weights_from_disk(call["model"])[0]))
        if call["op"] == "metrics":
            tell(metrics=metrics())
        if call["op"] == "unknown":
            tell(unknown=unknown())
    engine.shutdown()


if __name__ == "__main__":
    main()
