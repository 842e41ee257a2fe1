"""Hashes of what a model consists of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

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
    """Content hashes of files, remembered by path, size and times: weights are read once, not at each start."""

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        """Remember in the user's cache folder, or in the one given."""
        base = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
        self._path = (folder or pathlib.Path(base) / "kvport") / "content.json"
        self._known: dict[str, list[Any]] | None = None

    def file(self, path: pathlib.Path) -> str:
        """Hash a file, or remember its hash."""
        path = path.resolve()
        info = path.stat()
        stamp = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        known = self._load()
        entry = known.get(str(path))
        if isinstance(entry, list) and entry[:-1] == stamp:
            return str(entry[-1])
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


def model_files(folder: pathlib.Path, every: bool = False) -> list[pathlib.Path]:
    """List the weights and configs of a model; none if there are no weights.

    Where there are safetensors, engines load these, and no others are listed, except with every.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        return []
    weights = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHTS and p.is_file())
    if not weights:
        return []
    if not every and any(p.suffix == ".safetensors" for p in weights):
        weights = [p for p in weights if p.suffix == ".safetensors"]
    return [*weights, *(folder / name for name in _CONFIGS if (folder / name).is_file())]


def content_of(folder: pathlib.Path, cache: ContentCache, every: bool = False) -> bytes | None:
    """Hash the weights and configs of a model; None if there are no weights. For every see model_files."""
    if folder.is_file():
        return digest(["file", cache.file(folder)])
    files = model_files(folder, every)
    return digest(["folder", *(field for p in files for field in (p.name, cache.file(p)))]) if files else None


def files_in(path: pathlib.Path) -> list[pathlib.Path]:
    """List a file, or the files in a folder."""
    return [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())


def content_of_files(path: pathlib.Path, cache: ContentCache) -> list[str]:
    """Give name and hash of a file, or of each file in a folder; an error if there are none."""
    files = files_in(path)
    if not files:
        raise FileNotFoundError(f"{path} has no files")
    return [field for p in files for field in (p.name, cache.file(p))]


def local_folder(model: str, revision: str | None) -> pathlib.Path | None:
    """Find where a model's files lie; None if they are not on this machine."""
    if os.path.exists(model):
        return pathlib.Path(model)
    try:
        from huggingface_hub import snapshot_download  # type: ignore[import-not-found,unused-ignore]

        return pathlib.Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not there, or no such package: the caller says what that means
        return None
