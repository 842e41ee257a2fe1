"""Finding the agent of this engine, or starting it. Whoever comes first starts it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import socket
import stat
import struct
import subprocess
import tempfile
import time

from .errors import KvportError

_START_TIMEOUT = 15.0
_MAX_PATH = 100  # of a unix socket, with some room
_ANOTHER = "name another folder here, or set XDG_RUNTIME_DIR to one that is there"


def runtime_dir(named: str = "") -> pathlib.Path:
    """Make the folder of the sockets, which only this user may enter."""
    if named:
        folder = pathlib.Path(named)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folder = pathlib.Path(runtime) / "kvport"
    else:
        folder = pathlib.Path(tempfile.gettempdir()) / f"kvport-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=False, exist_ok=True)
        info = folder.lstat()
    except OSError as err:
        raise KvportError(f"agent_socket_dir: {folder} cannot be made ({err.strerror}); {_ANOTHER}") from err
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise KvportError(f"agent_socket_dir: {folder} is not a folder of ours with mode 0700; remove it, or {_ANOTHER}")
    return folder


def peer_pid(sock: socket.socket) -> int:
    """Tell who listens at the other end, and refuse another user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        raise OSError(f"the agent's socket belongs to user {uid}")
    return int(pid)


class Spawner:
    """Gives connections to the one agent of an engine on this machine."""

    def __init__(self, binary: str, config: str, engine: str, folder: str = "") -> None:
        """Take the kvport binary, the config's text and what the engine is called."""
        self._binary = binary
        self._config = config
        base = runtime_dir(folder) / ("agent-" + hashlib.sha256(engine.encode()).hexdigest()[:16])
        self.path = str(base) + ".sock"
        if len(self.path) > _MAX_PATH:
            raise KvportError(f"agent_socket_dir: {self.path} is too long for a socket; {_ANOTHER}, with a shorter path")
        self._lock_path = str(base) + ".lock"
        self._config_path = str(base) + ".json"
        self._lock: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._give_up_at = 0.0
        self.spawned = 0

    @property
    def starting(self) -> bool:
        """Say whether an agent of ours is on its way."""
        return self._lock is not None

    def connect(self) -> socket.socket | None:
        """Connect, or start the agent, in which case it is there a little later; never waits."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(self.path)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            self._start()
            return None
        except OSError:  # its queue is full, or our time is up
            sock.close()
            return None
        self._unlock()
        return sock

    def _start(self) -> None:
        if self._lock is not None:
            ended = self._child is None or self._child.poll() is not None
            if ended or time.monotonic() > self._give_up_at:
                self._unlock()
            return
        lock = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)  # somebody else starts it
            return
        self._lock = lock
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)  # of a dead agent: we have just been refused there
        self._write_config()
        self._spawn()

    def _write_config(self) -> None:
        # A file and not an argument: arguments are public, and limited to 128 KiB.
        fd, name = tempfile.mkstemp(dir=os.path.dirname(self._config_path))
        with os.fdopen(fd, "w") as file:
            file.write(self._config)
        os.replace(name, self._config_path)

    def _spawn(self) -> None:
        self.reap()
        command = [self._binary, "agent", "--kv-transfer-config", "@" + self._config_path, "--socket", self.path]
        # Its own session: a Ctrl-C at the engine's terminal is the engine's business, the agent ends
        # when all who attached have ended. No Pdeathsig: it would follow the spawning thread.
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._give_up_at = time.monotonic() + _START_TIMEOUT
        self.spawned += 1

    def reap(self) -> None:
        """Collect an agent of ours that ended."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None

    def close(self) -> None:
        """Start nobody any more."""
        self._unlock()
        self.reap()

    def _unlock(self) -> None:
        if self._lock is not None:
            # The agent has read it, or has ended: passwords of stores need not lie there any longer.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._config_path)
            os.close(self._lock)
            self._lock = None
