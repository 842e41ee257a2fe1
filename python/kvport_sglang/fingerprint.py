"""What must be equal for two engines to share pages. SGLang's keys cover tokens, extra_key and cache_salt only."""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvport_agent.content import ContentCache, content_of, content_of_files, digest, files_in, local_folder, model_files
from kvport_agent.errors import UnsupportedError

from .pool import Geometry
from .weights import fresh

log = logging.getLogger("sglang.kvport")

# Arguments of the server that change what a page of given tokens holds. To them come all others that this SGLang lists
# beside the model's, but those of _NEITHER.
_DECIDE = (
    "decrypted_config_file",
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "load_format",
    "model_config_parser",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_checkpoint_restore_path",
    "modelopt_quant",
    "quantization",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "trust_remote_code",
)

# The content of the weights stands for the first two. The others say how files come, and where they go.
_NEITHER = frozenset(
    {
        "model_path",
        "revision",
        "checkpoint_engine_wait_weights_before_ready",
        "delete_ckpt_after_loading",
        "download_dir",
        "engine_info_bootstrap_port",
        "model_checksum",
        "modelexpress_config",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "startup_weight_load_mode",
        "weight_cache_mode",
        "weight_cache_socket",
        "weight_cache_timeout",
        "weight_loader_disable_mmap",
        "weight_loader_drop_cache_after_load",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
    }
)

# The formats of weights (--load-format) that SGLang reads from the files that are hashed. For others it has copies or
# files elsewhere, which may be older than those of the model: a cache of numpy's, shards that it once wrote, a pack.
_FROM_FILES = frozenset(
    {
        "auto",
        "bitsandbytes",
        "dummy",
        "fastsafetensors",
        "flash_rl",
        "gguf",
        "instanttensor",
        "layered",
        "mistral",
        "pt",
        "remote",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)

# Names of arguments whose values are names of files end so: what is in the files decides.
_FILES = ("_file", "_path", "_profile")

_FIELDS = "sglang.srt.arg_groups.fields.model"

# Where an SGLang shows its arguments: since 0.5.23, and before.
_SHOW_ARGS = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)

# Where an SGLang shows what became of its arguments: what is "auto" there has a value here.
_RESOLVED = ("get_model", "get_spec", "get_lora")


def model(storage: Any, cache: ContentCache) -> bytes:
    """Hash all that decides what a page of given tokens holds."""
    name = getattr(storage, "model_name", None)
    if not name:
        raise UnsupportedError("SGLang does not name the model: pages of two models would be the same")
    args = _Arguments(_server_args())
    decide = [part for field in _fields() for part in _decided(field, args.get(field), cache)]
    return digest(["kvport/sglang-model/2", _weights(str(name), args, cache), *decide, *_adapters(args, cache)])


class _Arguments:
    """The arguments of SGLang's server, as they were given, or as they were resolved where SGLang shows that."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._resolved: list[Any] = []
        for show in _RESOLVED:
            try:
                self._resolved.append(getattr(importlib.import_module(_SHOW_ARGS[0][0]), show)())
            except Exception as err:
                log.debug("kvport: %s: %s", show, err)

    def get(self, field: str) -> Any:
        for bag in (*self._resolved, self._given):
            if (value := getattr(bag, field, None)) is not None:
                return value
        return None

    def given(self, field: str) -> Any:
        return getattr(self._given, field, None)


def _weights(name: str, args: _Arguments, cache: ContentCache) -> bytes:
    """Hash the weights, or what stands for them."""
    # The name is the one that the model is served under, which any two models may have in common.
    path, revision = args.given("model_path"), args.given("revision")
    load_format = args.get("load_format") or "auto"
    if load_format == "remote_instance" or args.get("weight_cache_mode") == "client":
        return unknown("come from another process, which may have changed them")
    if load_format not in _FROM_FILES:
        return unknown(f"are not read from the files of the model alone (--load-format {load_format})")
    folder = local_folder(str(path or name), revision)
    content = content_of(folder, cache, every=load_format == "pt") if folder is not None else None
    if content is not None and folder is not None:
        code = sorted(folder.glob("*.py")) if args.get("trust_remote_code") else []
        return digest(["local", content, *(part for p in code for part in content_of_files(p, cache))]) if code else content
    if not path:
        raise UnsupportedError(f"neither the path nor the weights of {name} are known: pages of two models would be the same")
    if args.get("delete_ckpt_after_loading"):
        return unknown("were deleted when they were loaded, and others may be put there (--delete-ckpt-after-loading)")
    log.warning("kvport: the weights of %s were not found: its path, name and revision stand for them", path)
    return digest(["name", str(path), name, str(revision)])


def unknown(why: str) -> bytes:
    """Give what nobody else has, in the place of weights that nobody knows."""
    log.warning("kvport: the weights %s: this engine shares its pages with nobody, and finds them only until it ends", why)
    return fresh()


def files(server_args: Any) -> dict[str, str | None]:
    """Describe the files that SGLang loads, without reading them: see whether they were written since.

    What comes from a hub lies in a folder of one commit, which is never written again: it stands for its files. None: it
    is not on this machine.
    """
    found: dict[str, str | None] = {}
    for name, revision, listed in _sources(server_args):
        folder = local_folder(name, revision)
        if folder is not None and os.path.exists(name):
            found.update((str(p), _stamp(p)) for p in listed(folder))
        else:
            found[name] = None if folder is None else str(folder)
    return found


def _stamp(path: pathlib.Path) -> str:
    # Not its number, which changes by itself on some mounts of object stores. A file of the same size and mtime that took
    # its place has another ctime.
    info = path.stat()
    return f"{info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"


_Source = tuple[str, str | None, Callable[[pathlib.Path], list[pathlib.Path]]]


def _sources(server_args: Any) -> Iterator[_Source]:
    """Name what SGLang loads, its revision, and what lists its files, by its arguments as they were given."""
    if path := getattr(server_args, "model_path", None):
        yield str(path), getattr(server_args, "revision", None), lambda folder: _model_files(folder, server_args)
    for _, path in _lora_paths(getattr(server_args, "lora_paths", None)):
        yield path, None, files_in
    for field in _fields():
        value = getattr(server_args, field, None)
        if isinstance(value, str) and value and field.endswith(_FILES):
            yield value, None, lambda folder: model_files(folder) or files_in(folder)


def _model_files(folder: pathlib.Path, server_args: Any) -> list[pathlib.Path]:
    code = sorted(folder.glob("*.py")) if getattr(server_args, "trust_remote_code", False) else []
    return [*model_files(folder, every=getattr(server_args, "load_format", None) == "pt"), *code]


def _fields() -> list[str]:
    """Name the arguments that decide."""
    try:
        listed = tuple(importlib.import_module(_FIELDS).Model.__struct_fields__)
    except Exception as err:
        log.debug("kvport: %s: %s", _FIELDS, err)
        listed = ()
    return sorted({*_DECIDE, *listed} - _NEITHER)


def _decided(field: str, value: Any, cache: ContentCache) -> list[str]:
    parts = [f"{field}={value}"]
    if not isinstance(value, str) or not field.endswith(_FILES):
        return parts
    path = pathlib.Path(value)
    try:
        whole = content_of(path, cache)
        return [*parts, whole.hex()] if whole is not None else [*parts, *content_of_files(path, cache)]
    except OSError as err:  # a name that is not one of a file
        log.debug("kvport: %s: %s", field, err)
        return parts


def _adapters(args: _Arguments, cache: ContentCache) -> list[str]:
    """Give name, path and content of the adapters that the server starts with: SGLang's keys have name and path only.

    Those that come later have names that nobody else has.
    """
    found: list[str] = []
    for name, path in sorted(_lora_paths(args.get("lora_paths"))):
        folder = local_folder(path, None)
        try:
            if folder is None:
                raise FileNotFoundError(f"{path} is not on this machine")
            found += ["adapter", name, path, *content_of_files(folder, cache)]
        except OSError as err:
            raise UnsupportedError(f"the files of adapter {name} are not found ({err}): pages of two adapters would be the same") from err
    return found


def _lora_paths(value: Any) -> list[tuple[str, str]]:
    """Read --lora-paths in all its forms: name and path of each adapter."""
    if isinstance(value, Mapping):
        return [(str(name), str(path)) for name, path in value.items()]
    out: list[tuple[str, str]] = []
    for each in value or ():
        if isinstance(each, str):
            name, _, path = each.partition("=") if "=" in each else (each, "", each)
            out.append((name, path))
        elif isinstance(each, Mapping):
            out.append((str(each["lora_name"]), str(each["lora_path"])))
        else:
            out.append((str(each.lora_name), str(each.lora_path)))
    return out


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
