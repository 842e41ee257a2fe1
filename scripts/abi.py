"""Compiles what native/ says of the vendors' C interfaces against the vendors' own headers.

Run through `make native-abi`. NIXL's wheel has no header, but the Rust crate nixl-sys of the same version
has: cargo fetches it, this checks its hash, and nothing of it is built. UCX's come from the wheel that
tools/headers.lock pins. With --gpu those of NCCL and CUDA, from wheels of
220 MB (tools/gpu-headers.lock), with the libraries for the tests.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
HEADERS = ROOT / ".deps" / "headers"
CRATE = "nixl-sys-1.5.1"
HEADER_SHA256 = "62b4c842b12086b93b51efa59c47fed8f30509d64eeff3b6512b705b6dda16dd"


class AbiError(Exception):
    """A failure that the user can do something about; its text says what."""


def run(*command):
    """Run a command, whose own message is shown when it fails."""
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    except FileNotFoundError as err:
        raise AbiError(f"{command[0]} is not there: install it (Debian: apt-get install {command[0]})") from err
    except subprocess.CalledProcessError as err:
        raise AbiError(f"`{' '.join(map(str, command[:3]))}` failed (its message is above)") from err


def nixl_header():
    """Return the folder with the crate's wrapper.h."""
    header = HEADERS / CRATE / "wrapper.h"
    if not header.exists():
        run("cargo", "info", "--quiet", CRATE.replace("-1", "@1"))
        home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
        found = sorted(home.glob(f"registry/src/*/{CRATE}/wrapper.h"))
        if not found:
            raise AbiError(f"cargo has fetched {CRATE}, but it is not below {home}")
        header.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found[0], header)
    if (got := hashlib.sha256(header.read_bytes()).hexdigest()) != HEADER_SHA256:
        header.unlink()
        raise AbiError(f"{header.name} of {CRATE} has SHA-256 {got}, not {HEADER_SHA256}")
    return header.parent


def wheel_headers(lock):
    """Return the folder with the headers of the wheels that a file pins."""
    into = HEADERS / lock.stem
    stamp = into / "lock.sha256"
    want = hashlib.sha256(lock.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="ascii") == want:
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="abi-", dir=into.parent) as tmp:
        tmp = pathlib.Path(tmp)
        print(f"abi: downloading the wheels of {lock.name}", flush=True)
        # Headers are the same on every machine, so one machine's hash is enough.
        run(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
            "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_27_x86_64", "--platform", "manylinux_2_18_x86_64",
            "--platform", "manylinux2014_x86_64", "--require-hashes", "-r", str(lock), "-d", str(tmp))
        part = tmp / "headers"
        for wheel in tmp.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part, [n for n in archive.namelist() if "/include/" in n or ("gpu" in lock.name and ".so" in n)])
        (part / stamp.name).write_text(want, encoding="ascii")
        if into.exists():
            shutil.rmtree(into)
        os.replace(part, into)
    return into


def check(source, *include):
    """Compile one check, without making anything of it."""
    folders = [word for folder in include for word in ("-isystem", str(folder))]
    run(os.environ.get("CC", "gcc"), "-std=c11", "-Wall", "-Wextra", "-Wcast-function-type", "-Werror", "-fsyntax-only",
        *folders, str(source))
    print(f"abi: {source.relative_to(ROOT)} agrees with the headers of {', '.join(str(i.relative_to(HEADERS)) for i in include)}")


def check_all(gpu):
    """Compile the checks of what make deps fetches, or of what needs a GPU."""
    if gpu:
        nvidia = wheel_headers(ROOT / "tools" / "gpu-headers.lock") / "nvidia"
        check(NATIVE / "cuda" / "abi" / "check.c", nvidia / "cu13" / "include")
        check(NATIVE / "nccl" / "abi" / "check.c", nvidia / "nccl" / "include", nvidia / "cu13" / "include")
        return
    check(NATIVE / "nixl" / "abi" / "check.c", nixl_header())
    check(NATIVE / "ucx" / "abi" / "check.c", wheel_headers(ROOT / "tools" / "headers.lock") / "libucx" / "include")


if __name__ == "__main__":
    try:
        check_all("--gpu" in sys.argv[1:])
    except (AbiError, OSError, zipfile.BadZipFile) as err:
        sys.exit(f"abi: {err}")
