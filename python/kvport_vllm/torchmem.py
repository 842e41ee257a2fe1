"""All that this package knows of torch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvport_agent.memfd import Memfd

from .layout import View

_SMALLEST = 1 << 20  # no cache is smaller, and no other allocation in the context is as large


class Adoption(TorchFunctionMode):  # type: ignore[misc]
    """Answers the one allocation of the KV cache with sealed memory that others can map."""

    def __init__(self, sizes: set[int], room: int) -> None:
        """Take the allocations' possible sizes, and the bytes to leave behind one."""
        super().__init__()
        self._sizes = sizes
        self._room = room
        self.memfd: Memfd | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Stand in for torch.zeros(bytes, dtype=int8) on the host; everything else goes on."""
        kwargs = kwargs or {}
        if func is torch.zeros and self.memfd is None and self._is_cache(args, kwargs):
            self.memfd = Memfd(args[0] + self._room)
            return torch.frombuffer(self.memfd.map, dtype=torch.int8, count=args[0])
        return func(*args, **kwargs)

    def _is_cache(self, args: Any, kwargs: Any) -> bool:
        if len(args) != 1 or not isinstance(args[0], int) or kwargs.get("dtype") is not torch.int8:
            return False
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        return args[0] in self._sizes if self._sizes else args[0] >= _SMALLEST


class TorchTensors:
    """Tensors by torch."""

    def view(self, tensor: Any) -> View:
        """Describe a tensor."""
        item = tensor.element_size()
        return View(tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in tensor.stride()), item)

    def storage(self, tensor: Any) -> tuple[int, int]:
        """Give address and bytes of the storage behind a tensor."""
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def on_host(self, tensor: Any) -> bool:
        """Say whether the tensor's bytes can be reached by address."""
        return bool(tensor.device.type == "cpu")

    def make_movable(self, tensor: Any) -> tuple[int, int]:
        """Move the storage to a mapping of its own, in place; all its views follow."""
        storage = tensor.untyped_storage()
        storage._share_fd_cpu_()
        return storage.data_ptr(), storage.nbytes()

    def copy_out(self, tensor: Any, block: int, ratio: int, into: memoryview) -> None:
        """Copy a block of a tensor, in the order of its dimensions."""
        self._bytes(into).copy_(tensor[block * ratio : (block + 1) * ratio].contiguous().cpu().view(torch.uint8).flatten())

    def copy_in(self, tensor: Any, block: int, ratio: int, data: memoryview) -> None:
        """Copy a block back."""
        target = tensor[block * ratio : (block + 1) * ratio]
        target.copy_(self._bytes(data).view(tensor.dtype).view(target.shape))

    @staticmethod
    def _bytes(view: memoryview) -> Any:
        return torch.frombuffer((ctypes.c_char * len(view)).from_buffer(view), dtype=torch.uint8)
