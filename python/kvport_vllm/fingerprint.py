"""What must be equal for two engines to share blocks: the model, and the byte layout of its cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .layout import Group

log = logging.getLogger("vllm.kvport")

_CHUNK = 4 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CONFIGS = ("config.json", "quantize_config.json", "quantization_config.json", "hf_quant_config.json")


def digest(fields: Iterable[bytes | str]) -> bytes:
    """Hash fields so that no two lists of fields collide."""
    h = hashlib.sha256()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.digest()


class ContentCache:
    """Content hashes of files, remembered by path, size and time: weights are read once, not at each start."""

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        """Remember in the user's cache folder, or in the one given."""
        base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
        self._path = (folder or pathlib.Path(base) / "kvport") / "content.json"
        self._known: dict[str, list[Any]] | None = None

    def file(self, path: pathlib.Path) -> str:
        """Hash a file, or remember its hash."""
        path = path.resolve()
        info = path.stat()
        stamp = [info.st_size, info.st_mtime_ns, info.st_ino]
        known = self._load()
        entry = known.get(str(path))
        if isinstance(entry, list) and len(entry) == 4 and entry[:3] == stamp:
            return str(entry[3])
        h = hashlib.sha256()
        with open(path, "rb") as f:
            while chunk := f.read(_CHUNK):
                h.update(chunk)
        known[str(path)] = [*stamp, h.hexdigest()]
        self._store(known)
        return h.hexdigest()

    def _load(self) -> dict[str, list[Any]]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                data = json.loads(self._path.read_text(encoding="utf-8"))
                self._known = data if isinstance(data, dict) else {}
        return self._known

    def _store(self, known: dict[str, list[Any]]) -> None:
        with contextlib.suppress(OSError):  # only a slower next start
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=self._path.parent)
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                json.dump(known, f)
            os.replace(name, self._path)


def content_of(folder: pathlib.Path, cache: ContentCache) -> bytes | None:
    """Hash the weights and configs of a model's folder; None if there are no weights in it."""
    if folder.is_file():
        return digest(["file", cache.file(folder)])
    if not folder.is_dir():
        return None
    weights = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHTS and p.is_file())
    if not weights:
        return None
    if any(p.suffix == ".safetensors" for p in weights):
        weights = [p for p in weights if p.suffix == ".safetensors"]  # what vLLM prefers to load
    configs = [folder / name for name in _CONFIGS if (folder / name).is_file()]
    fields = ["folder"]
    for path in [*weights, *configs]:
        fields += [path.name, cache.file(path)]
    return digest(fields)


def _local_folder(model: str, revision: str | None) -> pathlib.Path | None:
    if os.path.exists(model):
        return pathlib.Path(model)
    try:
        from huggingface_hub import snapshot_download  # type: ignore[import-not-found,unused-ignore]

        return pathlib.Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not there, or no such package: the caller says what that means
        return None


def model_fingerprint(vllm_config: Any, cache: ContentCache) -> bytes:
    """Hash all that decides what a block of given tokens holds."""
    model = vllm_config.model_config
    cache_config = vllm_config.cache_config
    revision = getattr(model, "revision", None)
    folder = _local_folder(str(model.model), revision)
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
