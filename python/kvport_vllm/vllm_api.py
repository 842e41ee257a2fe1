"""The parts of vLLM that this package uses, whichever version is there.

The API is experimental by its own words. What changed between versions is looked for here, once.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

KVConnectorBase_V1: Any = _base.KVConnectorBase_V1
KVConnectorMetadata: Any = _base.KVConnectorMetadata
KVConnectorRole: Any = _base.KVConnectorRole

# Since 0.12; before it nobody asked for hybrid groups.
SupportsHMA: Any = getattr(_base, "SupportsHMA", object)
KVConnectorWorkerMetadata: Any = getattr(_base, "KVConnectorWorkerMetadata", object)
# Since 0.31: completions and failures in one answer, instead of get_finished.
TransferResults: Any = getattr(_base, "KVConnectorTransferResults", None)

HAS_FAILED_RECVING = TransferResults is not None and "failed_recving" in getattr(TransferResults, "__dataclass_fields__", {})
# Without it nothing tells the scheduler that a step's blocks are true.
HAS_WORKER_METADATA = KVConnectorWorkerMetadata is not object
