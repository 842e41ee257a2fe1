"""A relay in front of a server, which makes the server look away, slow or hung at a moment that does not depend on the load."""

import contextlib
import socket
import threading
import time

CHUNK = 1 << 16
TO_SERVER, FROM_SERVER = "to the server", "from the server"


class Relay:
    """Passes bytes on in both directions. Nobody listens until come."""

    def __init__(self, server):
        self.server, self.delay = server, 0.0
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))  # the port is ours although connections are refused
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.changed, self.left, self.shut = threading.Condition(), {}, False

    def come(self):
        """Begin to take connections."""
        self.socket.listen(64)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        """Connect each client with the server."""
        host, port = self.server.split(":")
        with contextlib.suppress(OSError):  # the end
            while True:
                client, _ = self.socket.accept()
                server = socket.create_connection((host, int(port)))
                asked = threading.Event()
                for ends in (client, server, TO_SERVER), (server, client, FROM_SERVER):
                    threading.Thread(target=self.pump, args=(*ends, asked), daemon=True).start()

    def pump(self, source, target, direction, asked):
        """Pass on one direction of a connection until either end closes it."""
        with contextlib.suppress(OSError), source, target:
            while data := source.recv(CHUNK):
                if direction == TO_SERVER:
                    asked.set()
                elif asked.is_set():  # the beginning of an answer
                    asked.clear()
                    time.sleep(self.delay)
                self.pass_on(target, direction, data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

    def pass_on(self, target, direction, data):
        """Send data, unless the relay hangs or has to from now on; then once it does not."""
        with self.changed:
            if direction in self.left:
                self.left[direction] -= len(data)
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.shut or all(n > 0 for n in self.left.values()))
        target.sendall(data)

    @property
    def hangs(self):
        """Whether nothing is passed on now."""
        return any(n <= 0 for n in self.left.values())

    def held(self, timeout):
        """Wait until nothing is passed on; whether that has come."""
        with self.changed:
            return self.changed.wait_for(lambda: self.hangs, timeout)

    @contextlib.contextmanager
    def slow(self, seconds):
        """Have every answer begin so much later."""
        self.delay = seconds
        try:
            yield
        finally:
            self.delay = 0.0

    @contextlib.contextmanager
    def hung(self, direction=FROM_SERVER, after=0):
        """Pass nothing on, in either direction, once so many bytes have gone in one."""
        with self.changed:
            self.left = {direction: after}
        try:
            yield
        finally:
            with self.changed:
                self.left = {}
                self.changed.notify_all()

    def stop(self):
        """End it."""
        with self.changed:
            self.shut = True
            self.changed.notify_all()
        self.socket.close()
