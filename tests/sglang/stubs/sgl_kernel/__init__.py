"""Takes the place of SGLang's kernels, of which no index has a build for CPUs: everything imports, and raises when it is called.

Only one function does anything: it writes numbers of slots into a table. No arithmetic of a model is done here.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(requests, table, starts, ends, slots, _width):
    """Give each request the next slots for its tokens from start to end."""
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        n = end - start
        table[request, start:end] = slots[done : done + n].to(table.dtype)
        done += n


def _absent(name):
    def call(*_args, **_kwargs):
        raise NotImplementedError(f"{name} is not there on a CPU")

    return call


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(name)


class _Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules below this one, all of which are like it."""

    def find_spec(self, name, _path=None, _target=None):
        """Find all but scalar_type: without that one SGLang uses a table of its own."""
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.scalar_type":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """Make a module whose every name is absent."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        """Do nothing more."""


sys.meta_path.append(_Below())
