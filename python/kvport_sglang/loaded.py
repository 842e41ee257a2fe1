"""Which files SGLang has loaded, by size and times, from before it did.

A backend hashes them when it is made, which may be days later. Where they were written meanwhile, the hashes are of
other weights than those that this process computes with.
"""

from __future__ import annotations

import logging
from typing import Any

from . import fingerprint

log = logging.getLogger("sglang.kvport")


class Files:
    """The files of one process. Where note is not called, as in an SGLang without plugins, nothing is known of them."""

    def __init__(self) -> None:
        """Know nothing."""
        self._noted = False
        self._args: Any = None
        self._then: dict[str, str | None] | None = None

    def note(self, server_args: Any) -> None:
        """Note how the files are before they are loaded."""
        self._noted, self._args, self._then = True, server_args, _look(server_args)

    def fetched(self) -> None:
        """Note what was not on this machine, and has been fetched to be loaded."""
        if self._then is not None:
            now = _look(self._args) or {}
            self._then = {name: now.get(name) if was is None else was for name, was in self._then.items()}

    def changed(self) -> bool:
        """Say whether the files are others than those that were loaded; also where that cannot be seen."""
        if not self._noted:
            return False
        now = _look(self._args)
        if now is None or self._then is None:
            log.warning("kvport: it cannot be seen whether files were changed since they were loaded")
            return True
        if now.keys() != self._then.keys():
            return True
        return any(was is not None and now[name] != was for name, was in self._then.items())


def _look(server_args: Any) -> dict[str, str | None] | None:
    try:
        return fingerprint.files(server_args)
    except Exception as err:  # no reason not to start: this may be an engine without a backend of ours
        log.info("kvport: the files that SGLang loads cannot be listed: %s", err)
        return None


# They are the process's, and so is what it loads.
FILES = Files()
