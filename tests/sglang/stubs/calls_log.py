"""Writes down what SGLang asks its storage backend, whichever it is: one JSON object a line in CALLS_LOG.

The backend's numbers, if it has any, are in CALLS_LOG.numbers twice a second. Nothing is changed.
"""

import functools
import json
import os
import threading
import time

_METHODS = ("batch_exists", "batch_get_v1", "batch_set_v1", "batch_get", "batch_set")


def register():
    """Have SGLang call logged when it makes a storage backend."""
    if "CALLS_LOG" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend", logged, HookType.AROUND)


def logged(create, *args, **kwargs):
    """Make the backend, and log its calls."""
    backend = create(*args, **kwargs)
    path, lock = os.environ["CALLS_LOG"], threading.Lock()
    for name in _METHODS:
        if callable(plain := getattr(backend, name, None)):
            setattr(backend, name, functools.partial(_call, name, plain, path, lock))
    if hasattr(backend, "numbers"):
        threading.Thread(target=_numbers, args=(backend, path + ".numbers"), daemon=True).start()
    return backend


def _call(name, plain, path, lock, keys, *args, **kwargs):
    begun = time.monotonic()
    result = plain(keys, *args, **kwargs)
    seconds = time.monotonic() - begun
    done = result if isinstance(result, (int, bool)) else sum(r is not None and r is not False for r in result or ())
    row = {"method": name, "keys": len(keys), "first": keys[0] if keys else "", "done": int(done), "seconds": seconds, "begun": begun}
    with lock, open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return result


def _numbers(backend, path):
    while True:
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(backend.numbers.all(), file)
        os.replace(path + ".new", path)
        time.sleep(0.5)
