"""Makes .deps/peers: other people's stores of KV cache, for `kvport bench store --peers`.

Run `python3 verify/bench/peers/setup.py`. Wheels from PyPI only, every one pinned by hash: safetensors, redis-py
and Mooncake by requirements.txt (50 MB), LMCache with all that it needs by tools/python (6 GB, in
.deps/vllm, shared with `make vllm-test`); --without-lmcache leaves that out. What cannot be installed is
named, and named again by the benchmark. A second run finds everything and does nothing.
"""

import argparse
import ctypes.util
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import deps  # noqa: E402
import vllm_setup  # noqa: E402

PINS = pathlib.Path(__file__).resolve().parent / "requirements.txt"


def small(folder):
    """The virtual environment with all but LMCache."""
    mark = folder / "venv" / "peers.sha256"
    if vllm_setup.done(mark, want := vllm_setup.stamp(PINS)):
        return
    base = vllm_setup.python()
    vllm_setup.run("making an environment", base, "-m", "venv", "--clear", folder / "venv")
    vllm_setup.run("installing peers", folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                   "--no-deps", "--require-hashes", "--only-binary=:all:", "-r", PINS)
    mark.write_text(want, encoding="ascii")


def usable(python, path, module):
    """Why a module does not work; empty if it does."""
    done = subprocess.run([str(python), "-c", f"import {module}"], check=False, capture_output=True, text=True, env={"PYTHONPATH": str(path)})
    return done.stderr.strip().splitlines()[-1] if done.returncode != 0 else ""


def lmcache(found):
    """LMCache beside vLLM's packages."""
    folder = ROOT / ".deps" / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        vllm_setup.install(folder)
        vllm_setup.lmcache(folder)
    except (vllm_setup.SetupError, OSError) as err:
        found["lmcache"] = {"absent": str(err).splitlines()[0]}
        return
    add(found, "lmcache", "lmcache.cli.commands.bench.server_bench.client", folder / "venv" / "bin" / "python", folder / "lmcache")


def add(found, name, module, python, path=""):
    """Note a peer, or why it does not work."""
    why = usable(python, path, module)
    if "libibverbs" in why and not ctypes.util.find_library("ibverbs"):
        why += " (install your distribution's libibverbs1 and librdmacm1)"
    found[name] = {"absent": why} if why else {"python": str(python), "path": str(path)}


def main():
    """All peers; peers.json says where they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=pathlib.Path, default=ROOT / ".deps" / "peers")
    parser.add_argument("--without-lmcache", action="store_true", help="do not install LMCache, which needs 6 GB")
    options = parser.parse_args()
    folder = options.dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    small(folder)
    for name, module in (("safetensors", "safetensors.numpy"), ("redis", "redis"), ("mooncake", "mooncake.store")):
        add(found, name, module, folder / "venv" / "bin" / "python")
    if options.without_lmcache:
        found["lmcache"] = {"absent": "setup.py ran with --without-lmcache"}
    else:
        lmcache(found)
    (folder / "peers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, what in found.items():
        print(f"peers: {name}: {what.get('absent') or 'ready'}")


if __name__ == "__main__":
    try:
        main()
    except (vllm_setup.SetupError, deps.DepsError, OSError) as err:
        sys.exit(f"peers: {err}")
