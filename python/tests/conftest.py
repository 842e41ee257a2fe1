import os
import pathlib
import shutil
import subprocess
import sys
import types

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
    go = os.environ.get("GO", "go")
    assert shutil.which(go), f"{go} is not there, and builds a plugin: set GO to the path of Go, or run `make pytest`"
    folder = tmp_path_factory.mktemp("plugins")
    command = [go, "build", "-o", str(folder / "kvport-hold"), "./engine/testdata/plugin"]
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


@pytest.fixture
def engine(here):
    """Make engines of SGLang that are closed at the end."""
    import sglang_engine as rig

    made = []

    def make(**more):
        made.append(rig.Engine(here, **more))
        return made[-1]

    yield make
    for e in made:
        e.close()


@pytest.fixture
def server_args(monkeypatch):
    """Show arguments of SGLang's server at one place, as one of its versions does."""
    from kvport_sglang import fingerprint

    def show(module=fingerprint._SHOW_ARGS[0][0], name=fingerprint._SHOW_ARGS[0][1], **fields):
        args = types.SimpleNamespace(**fields)

        def retired():
            raise RuntimeError("retired")

        for other, function in fingerprint._SHOW_ARGS:
            monkeypatch.setitem(sys.modules, other, types.SimpleNamespace(**{function: retired}))
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: lambda: args}))
        return args

    return show
