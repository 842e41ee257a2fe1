"""The messages of proto/kvport/v1/agent.proto, as classes that are built when they are needed.

Generated code only works with the protobuf it was generated for, and vLLM decides which one is
installed. The descriptor set beside this file works with every protobuf since 4.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTORS = "v1.binpb"

SIDE_SCHEDULER, SIDE_WORKER = 1, 2
POLICY_ALL, POLICY_TRAILING = 1, 2
REASON_STOP, REASON_LENGTH, REASON_ABORT, REASON_ERROR = 1, 2, 3, 4
LOADED, SAVED, FINISHED, RELEASED, ANSWERED, LANDED, LOST, LAYERS = 1, 2, 3, 4, 5, 6, 7, 8

# Codes of Error that say that the two ends do not fit, so that a start should fail.
CODE_UNSPECIFIED, CODE_INCOMPATIBLE = 0, 3


def descriptor_file() -> pathlib.Path:
    """Find the descriptor set: in the package, or in the repository that this file is part of."""
    here = pathlib.Path(__file__).resolve().parent
    packaged = here / DESCRIPTORS
    return packaged if packaged.exists() else here.parent.parent / "proto" / "kvport" / "v1" / DESCRIPTORS


@functools.lru_cache(maxsize=1)
def _pool() -> descriptor_pool.DescriptorPool:
    # Its own pool: another copy of kvport.v1 in the process must not clash with this one.
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_file().read_bytes())
    for file in files.file:
        pool.Add(file)
    return pool


@functools.cache
def message(name: str) -> Any:
    """Give the class of a message of package kvport.v1."""
    descriptor = _pool().FindMessageTypeByName(f"kvport.v1.{name}")
    make = getattr(message_factory, "GetMessageClass", None)
    if make is None:  # before protobuf 4.22
        return message_factory.MessageFactory(_pool()).GetPrototype(descriptor)
    return make(descriptor)
