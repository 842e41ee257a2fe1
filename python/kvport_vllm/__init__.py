"""kvport's connector for vLLM: any kvport plugin, through vLLM's own --kv-transfer-config.

{"kv_connector": "KvportConnector", "kv_connector_module_path": "kvport_vllm", "kv_role": "kv_both",
 "kv_connector_extra_config": {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {...}}}
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["KvportConnector"]
__version__ = "0.1.0"


def _config_of_caller() -> Any:
    """Find the config for which vLLM looks the class up.

    vLLM has no hook that shows a connector its config before the model is loaded, minutes later.
    It does look the class up by name while it puts its config together, in a function that was given
    that config; where a version does not, the check happens when the connector is made.
    """
    frame = sys._getframe(2)
    config = frame.f_locals.get("kv_transfer_config")
    return config if hasattr(config, "kv_connector_extra_config") else None


def __getattr__(name: str) -> Any:
    if name != "KvportConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    outer = _config_of_caller()
    if outer is not None:
        from .config import check_early

        check_early(outer)
    from .connector import KvportConnector

    return KvportConnector
