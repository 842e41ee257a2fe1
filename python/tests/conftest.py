import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fakes  # noqa: E402

fakes.install()

ROOT = HERE.parent.parent


@pytest.fixture(scope="session")
def binaries():
    """The folder of kvport and its plugins: what `make build` made."""
    kvport = ROOT / "bin" / "kvport"
    assert kvport.exists(), "bin/kvport is not there: run `make build`"
    return kvport.parent


@pytest.fixture(scope="session")
def layered(tmp_path_factory):
    """The folder of a plugin that brings loads layer by layer: the one of package engine's own tests."""
    folder = tmp_path_factory.mktemp("plugins")
    command = [os.environ.get("GO", "go"), "build", "-o", str(folder / "kvport-hold"), "./engine/testdata/plugin"]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture
def here(tmp_path, binaries, monkeypatch):
    """A folder of its own for the agent's files, and kvport as it was built."""
    monkeypatch.setenv("KVPORT_BIN", str(binaries / "kvport"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path
