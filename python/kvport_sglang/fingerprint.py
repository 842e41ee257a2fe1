"""What must be equal for two engines to share pages. SGLang's keys cover tokens, extra_key and cache_salt only."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from kvport_agent.content import ContentCache, content_of, digest, local_folder
from kvport_agent.errors import UnsupportedError

from .pool import Geometry

log = logging.getLogger("sglang.kvport")

# Arguments of the server that change what a page of given tokens holds.
_DECIDE = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "quantization_param_path",
    "json_model_override_args",
    "load_format",
    "speculative_algorithm",
    "speculative_draft_model_path",
)

# Where an SGLang shows its arguments: since 0.5.23, and before.
_SHOW_ARGS = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)


def model(storage: Any, cache: ContentCache) -> bytes:
    """Hash all that decides what a page of given tokens holds."""
    name = getattr(storage, "model_name", None)
    if not name:
        raise UnsupportedError("SGLang does not name the model: pages of two models would be the same")
    args = _server_args()
    # The name is the one that the model is served under, which any two models may have in common.
    path = getattr(args, "model_path", None)
    revision = getattr(args, "revision", None)
    folder = local_folder(str(path or name), revision)
    content = content_of(folder, cache) if folder is not None else None
    if content is None:
        if not path:
            raise UnsupportedError(f"neither the path nor the weights of {name} are known: pages of two models would be the same")
        log.warning("kvport: the weights of %s were not found: its path, name and revision stand for them", path)
        content = digest(["name", str(path), str(name), str(revision)])
    decide = [f"{field}={getattr(args, field, None)}" for field in _DECIDE]
    return digest(["kvport/sglang-model/1", content, *decide])


def _server_args() -> Any:
    """Give the arguments of SGLang's server; None where this SGLang does not show them."""
    for module, name in _SHOW_ARGS:
        try:
            return getattr(importlib.import_module(module), name)()
        except Exception as err:
            log.debug("kvport: %s.%s: %s", module, name, err)
    log.warning("kvport: SGLang does not show its arguments: engines that differ in them only would share pages")
    return None


def rank(storage: Any) -> str:
    """Name this rank's part of a page. All ranks of a model with MLA have the same part."""
    whole = bool(getattr(storage, "is_mla_model", False))
    kinds = ("pp", "attn_cp", "dcp") if whole else ("tp", "pp", "attn_cp", "dcp")
    if getattr(storage, "should_split_heads", False):
        raise UnsupportedError("SGLang wants to split the heads of a page (tp_lcm_size): kvport keeps pages whole")
    return " ".join(f"{kind} {getattr(storage, f'{kind}_rank', 0)} of {getattr(storage, f'{kind}_size', 1)}" for kind in kinds)


def process(storage: Any) -> str:
    """Tell this process from the others of its engine, all of which have an agent of their own."""
    return ".".join(f"{kind}{getattr(storage, f'{kind}_rank', 0)}" for kind in ("dp", "pp", "attn_cp", "tp"))


def shape_text(pages: Geometry, storage: Any) -> str:
    """Spell out the bytes of a page on one rank; equal text, equal bytes."""
    return f"{pages.text}; {rank(storage)}"


def shape(pages: Geometry, storage: Any) -> bytes:
    """Hash that text and all lengths, of which it has only the first."""
    return digest(["kvport/sglang-shape/1", shape_text(pages, storage), *(str(n) for n in pages.lengths)])
