import pathlib
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
