"""The command `kvport` of the wheel: the program beside this file."""

from __future__ import annotations

import os
import pathlib
import sys


def main() -> None:
    """Become the program. It finds its plugins in its own folder."""
    program = pathlib.Path(__file__).with_name("bin") / "kvport"
    os.execv(program, ["kvport", *sys.argv[1:]])
