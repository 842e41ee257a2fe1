"""Makes .deps/sglang: an unpatched SGLang in a folder beside the environment of vLLM, whose PyTorch it uses.

Run through `make sglang-test`. Wheels only, every one pinned by hash in tools/python; a second run finds
everything and does nothing. --dir FOLDER and --vllm FOLDER make it elsewhere.
"""

import argparse
import pathlib
import shutil
import sys
import time

import deps
import vllm_setup

ROOT = vllm_setup.ROOT
NEEDED = 2 << 30  # bytes: 0.6 GB installed, and what the installer unpacks beside
BUILDS = ("g++", "ninja")  # SGLang compiles its hash of pages at its first request


def overlay(folder, vllm):
    """SGLang and what it lacks, in a folder for PYTHONPATH."""
    pins, mark = vllm_setup.PINS / "sglang-requirements.txt", folder / "overlay" / "sglang.sha256"
    if vllm_setup.done(mark, want := vllm_setup.stamp(pins)):
        print(f"sglang: {folder / 'overlay'} is there")
        return
    if (free := shutil.disk_usage(folder).free) < NEEDED:
        raise vllm_setup.SetupError(f"{folder} has {free >> 20} MiB free, SGLang needs {NEEDED >> 20} MiB.")
    shutil.rmtree(folder / "overlay", ignore_errors=True)
    vllm_setup.run("installing SGLang (45 wheels)", vllm / "uv" / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes",
                   "--only-binary=:all:", "--python", vllm / "venv" / "bin" / "python", "--target", folder / "overlay", "-r", pins)
    mark.write_text(want, encoding="ascii")


def main():
    """All steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=pathlib.Path, default=ROOT / ".deps" / "sglang")
    parser.add_argument("--vllm", type=pathlib.Path, default=ROOT / ".deps" / "vllm")
    args = parser.parse_args()
    folder, vllm = args.dir.absolute(), args.vllm.absolute()
    if missing := [tool for tool in BUILDS if shutil.which(tool) is None]:
        raise vllm_setup.SetupError(f"SGLang compiles a file when it starts, for which {' and '.join(missing)} is missing. Install it, "
                                    "and the headers of OpenSSL.")
    folder.mkdir(parents=True, exist_ok=True)
    vllm.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    vllm_setup.install(vllm)
    vllm_setup.convert(vllm)
    overlay(folder, vllm)
    print(f"sglang: ready in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (vllm_setup.SetupError, deps.DepsError, OSError) as err:
        sys.exit(f"sglang: {err}")
    except KeyboardInterrupt:
        sys.exit("sglang: interrupted; run it again to go on")
