"""What must be equal for two engines to share blocks: the model, and the byte layout of its cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvport_agent.content import ContentCache, content_of, digest, local_folder

from .layout import Group

log = logging.getLogger("vllm.kvport")


def model_fingerprint(vllm_config: Any, cache: ContentCache) -> bytes:
    """Hash all that decides what a block of given tokens holds."""
    model = vllm_config.model_config
    cache_config = vllm_config.cache_config
    revision = getattr(model, "revision", None)
    folder = local_folder(str(model.model), revision)
    content = content_of(folder, cache) if folder is not None else None
    if content is None:
        log.warning("kvport: the weights of %s were not found: its name and revision stand for them", model.model)
        content = digest(["name", str(model.model), str(revision)])
    hf = getattr(model, "hf_config", None)
    config = hf.to_dict() if hf is not None and hasattr(hf, "to_dict") else {}
    config = {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}
    fields: list[bytes | str] = [
        "kvport/vllm-model/1",
        content,
        json.dumps(config, sort_keys=True, default=str),
        str(model.dtype),
        str(getattr(model, "quantization", None)),
        str(revision),
        str(getattr(cache_config, "cache_dtype", "auto")),
        str(bool(getattr(cache_config, "calculate_kv_scales", False))),
        str(getattr(vllm_config, "speculative_config", None) and _speculation(vllm_config.speculative_config)),
    ]
    return digest(fields)


def _speculation(config: Any) -> str:
    # A drafter's layers are in the cache too: its identity is part of what a block holds.
    return f"{getattr(config, 'method', '')}/{getattr(config, 'model', '')}/{getattr(config, 'revision', '')}"


def kernels(vllm_config: Any, groups: Sequence[Group]) -> str:
    """Name what writes the cache's bytes: on a CPU the same shape holds other bytes per instruction set."""
    layers: Mapping[str, Any] = getattr(vllm_config.compilation_config, "static_forward_context", {}) or {}
    names = set()
    for group in groups:
        for name in group.layers:
            layer = layers.get(name)
            if layer is None:
                continue
            backend = getattr(layer, "attn_backend", None)
            kind = backend.get_name() if backend is not None and hasattr(backend, "get_name") else type(layer).__name__
            isa = getattr(layer, "isa", None) or _cpu_isa(kind, vllm_config, layer, group)
            names.add(f"{kind}:{isa}" if isa else str(kind))
    return "+".join(sorted(names)) or "unknown"


def _cpu_isa(kind: Any, vllm_config: Any, layer: Any, group: Group) -> str:
    if "CPU" not in str(kind):
        return ""
    from vllm.v1.attention.backends import cpu_attn  # type: ignore[import-not-found,unused-ignore]

    dtype, head = vllm_config.model_config.dtype, getattr(layer, "head_size", None)
    return str(cpu_attn._get_attn_isa(dtype, group.block_tokens, head, vllm_config.cache_config.cache_dtype))


def shape_text(vllm_config: Any, kv_cache_config: Any, groups: Sequence[Group], layout: str, how: str) -> str:
    """Spell out the byte layout of one block on one rank; equal text, equal bytes."""
    parallel = vllm_config.parallel_config
    parts = [
        f"layout {'dense' if how == 'mirror' else layout}",
        f"kernels {kernels(vllm_config, groups)}",
        f"world {parallel.world_size} tp {parallel.tensor_parallel_size} pp {parallel.pipeline_parallel_size}",
    ]
    for index, (group, theirs) in enumerate(zip(groups, kv_cache_config.kv_cache_groups, strict=True)):
        spec = theirs.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None)
        spec = next(iter(inner.values())) if isinstance(inner, dict) else spec
        parts.append(
            f"group {index}: {type(spec).__name__}, {len(group.layers)} layers, block {group.block_tokens}, "
            f"window {group.window}, heads {getattr(spec, 'num_kv_heads', '?')}, head {getattr(spec, 'head_size', '?')}/"
            f"{getattr(spec, 'head_size_v', '?')}, dtype {getattr(spec, 'dtype', '?')}, page {getattr(spec, 'page_size_bytes', '?')}, "
            f"quant {getattr(spec, 'kv_quant_mode', '?')!s}"
        )
    return "; ".join(parts)
