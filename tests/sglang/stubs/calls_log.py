"""Writes down what SGLang asks its storage backend, whichever it is: JSON objects, one a line, in CALLS_LOG.

A call has a line when it begins and another when it ends, with what came of it. late is by how much sleeps of this
process were too long meanwhile: what a busy machine adds. The backend's numbers, if it has any, are in
CALLS_LOG.numbers twice a second. Nothing is changed.
"""

import functools
import itertools
import json
import os
import threading
import time

_METHODS = ("batch_exists", "batch_get_v1", "batch_set_v1", "batch_get", "batch_set")
_BEAT, _BEATS = 0.05, 10  # seconds, and how many of them from one file of numbers to the next


def register():
    """Have SGLang call logged when it makes a storage backend."""
    if "CALLS_LOG" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend", logged, HookType.AROUND)


def logged(create, *args, **kwargs):
    """Make the backend, and log its calls."""
    backend = create(*args, **kwargs)
    log = Log(os.environ["CALLS_LOG"])
    for name in _METHODS:
        if callable(plain := getattr(backend, name, None)):
            setattr(backend, name, functools.partial(log.call, name, plain))
    threading.Thread(target=log.beat, args=(getattr(backend, "numbers", None),), daemon=True).start()
    return backend


class Log:
    """The log of one backend."""

    def __init__(self, path):
        self.path, self.late = path, 0.0
        self._lock, self._serial = threading.Lock(), itertools.count(1)

    def call(self, name, plain, keys, *args, **kwargs):
        """Make a call between its two lines."""
        row = {"call": next(self._serial), "method": name, "keys": len(keys), "first": keys[0] if keys else "", "begun": time.monotonic()}
        self._write(row)
        late, end = self.late, {"done": 0, "raised": ""}
        try:
            result = plain(keys, *args, **kwargs)
            end["done"] = int(result if isinstance(result, (int, bool)) else sum(r is not None and r is not False for r in result or ()))
            return result
        except BaseException as err:
            end["raised"] = repr(err)
            raise
        finally:
            self._write({**row, **end, "seconds": time.monotonic() - row["begun"], "late": self.late - late})

    def _write(self, row):
        with self._lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def beat(self, numbers):
        """Measure how late sleeps end, and write the numbers down."""
        path = self.path + ".numbers"
        for n in itertools.count():
            begun = time.monotonic()
            time.sleep(_BEAT)
            self.late += max(0.0, time.monotonic() - begun - _BEAT)
            if numbers is not None and n % _BEATS == 0:
                with open(path + ".new", "w", encoding="utf-8") as file:
                    json.dump(numbers.all(), file)
                os.replace(path + ".new", path)
