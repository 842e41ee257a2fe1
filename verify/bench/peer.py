"""Answers commands on standard input with numbers on standard output, for kvport bench.

prefill N         tokens per second of a prompt of N tokens (llama.cpp)
decode B          tokens per second of B requests of 32 tokens after 128, together (llama.cpp)
save PATH N SIZE  seconds to write N tensors of SIZE bytes to one file and rename it (safetensors)
load PATH N SIZE  seconds to read them into memory that is there (safetensors)

What cannot be answered is answered with "absent REASON".
"""

import concurrent.futures
import json
import os
import sys
import time
import urllib.request

MODEL, THREADS = sys.argv[1], int(sys.argv[2])
state = {}


def server():
    if "server" not in state:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = MODEL
        params.n_ctx, params.n_parallel, params.warmup = 8192, 8, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
        state["server"] = xllamacpp.Server(params)
    return state["server"]


def complete(tokens, predict):
    body = {"prompt": tokens, "n_predict": predict, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    request = urllib.request.Request(server().listening_address + "/completion", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["timings"]


def tokens(n, seed):
    return [(i * 7919 + seed * 104729) % 40000 + 100 for i in range(n)]


def prefill(n):
    server()
    return complete(tokens(int(n), time.monotonic_ns()), 1)["prompt_per_second"]


def decode(batch):
    server()
    seed = time.monotonic_ns()
    with concurrent.futures.ThreadPoolExecutor(int(batch)) as pool:
        timings = list(pool.map(lambda i: complete(tokens(128, seed + i), 32), range(int(batch))))
    return sum(t["predicted_per_second"] for t in timings)


def blocks(n, size):
    key = (n, size)
    if key not in state:
        import numpy

        state[key] = {str(i): numpy.full(int(size), i, dtype=numpy.uint8) for i in range(int(n))}
    return state[key]


def save(path, n, size):
    from safetensors.numpy import save_file

    data = blocks(n, size)
    begin = time.perf_counter()
    save_file(data, path + ".tmp")
    os.rename(path + ".tmp", path)
    return time.perf_counter() - begin


def load(path, n, size):
    from safetensors.numpy import load_file

    data = blocks(n, size)
    begin = time.perf_counter()
    for name, tensor in load_file(path).items():
        data[name][:] = tensor
    return time.perf_counter() - begin


answers = os.fdopen(os.dup(1), "w")  # libraries may print: theirs goes to standard error
os.dup2(2, 1)
for line in sys.stdin:
    name, *arguments = line.split()
    try:
        answer = {"prefill": prefill, "decode": decode, "save": save, "load": load}[name](*arguments)
    except ImportError as e:
        answer = f"absent {e}"
    except Exception as e:  # a peer that fails is no reason to lose the other rows
        answer = f"absent {type(e).__name__}: {e}"
    print(str(answer).replace("\n", " "), file=answers, flush=True)
