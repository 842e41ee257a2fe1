"""Makes .deps/sglang: an unpatched SGLang in a folder beside the environment of vLLM, whose PyTorch it uses.

Run through `make sglang-test`. Wheels only, every one pinned by hash in tools/python; a second run finds
everything and does nothing. --dir FOLDER and --vllm FOLDER make it elsewhere.
"""

import argparse
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time

import deps
import vllm_setup

ROOT = vllm_setup.ROOT
NEEDED = 2 << 30  # bytes: 0.6 GB installed, and what the installer unpacks beside
PYTHONS = ("3.11",)  # for which its wheels are pinned: those of SGLang and of four others are for one version each
GLIBC = (2, 34)
# What SGLang includes and links when it compiles its hash of pages, at its first request.
PROBE = "#include <Python.h>\n#include <openssl/sha.h>\nvoid *probe() { return (void *)SHA256_Init; }\n"


def check_python(vllm):
    """Give the Python to use; refuse one that the wheels are not for, before anything is fetched."""
    glibc = platform.libc_ver()[1]
    if tuple(int(n) for n in glibc.split(".")[:2] if n.isdigit()) < GLIBC:
        raise vllm_setup.SetupError(f"the wheel of SGLang is for glibc {'.'.join(map(str, GLIBC))} or later, this is {glibc or 'another library'}.")
    made = [p.name.removeprefix("python") for p in (vllm / "venv" / "lib").glob("python3*")]
    if made and made[0] not in PYTHONS:
        raise vllm_setup.SetupError(f"{vllm / 'venv'} has Python {made[0]}, and the wheels of SGLang are pinned for {', '.join(PYTHONS)}. "
                                    f"Make another environment beside it: `make sglang-test VLLM_DIR=.deps/vllm{PYTHONS[0]} PYTHON=python{PYTHONS[0]}`.")
    return str(vllm / "venv" / "bin" / "python") if made else vllm_setup.python(PYTHONS)


def check_compiler(python):
    """Refuse a machine on which SGLang could not compile."""
    include = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder) / "probe.cpp"
        probe.write_text(PROBE, encoding="ascii")
        try:
            done = subprocess.run(["g++", "-shared", "-fPIC", f"-I{include}", str(probe), "-o", f"{folder}/probe.so", "-lcrypto"], check=False,
                                  capture_output=True, text=True)
            said = done.stderr if done.returncode else ""
        except FileNotFoundError as err:
            said = str(err)
    if said:
        raise vllm_setup.SetupError(f"SGLang compiles a file when it starts, for which it needs g++ and the headers of Python {PYTHONS[0]} and OpenSSL "
                                    f"(on Debian: g++, python3-dev, libssl-dev). A test of these failed:\n{said}")


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
    check_compiler(check_python(vllm))
    folder.mkdir(parents=True, exist_ok=True)
    vllm.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    vllm_setup.install(vllm, PYTHONS)
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
