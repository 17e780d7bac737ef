"""A way to a server that a test can cut: connections through it die, and new ones are refused until it is mended.

It can be slow, too: what is sent over a new connection takes a while to arrive.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TcpProxy:
    """Listens on `port` and passes bytes to and from `127.0.0.1:target_port`, `slow_seconds` after connecting."""

    slow_seconds = 0.0

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        # Bound, and never listening: nobody else is given the port while it is cut.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        self.mend()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        with self._lock:
            _close(self._listener)
            for pair in self._pairs:
                for end in pair:
                    _close(end)
            self._pairs.clear()

    def close(self) -> None:
        """Cut it, and give its port up."""
        self.cut()
        self._reserved.close()

    def mend(self) -> None:
        """Listen again, on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept(self._listener)

    def _accept(self, listener: socket.socket) -> None:
        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", self._target_port))
                    with self._lock:
                        if listener.fileno() < 0:
                            # Cut while this connection was being made.
                            _close(near)
                            _close(far)
                            return
                        self._pairs.append((near, far))
                    arguments = (near, far, self.slow_seconds)
                    threading.Thread(target=_pass_on, args=arguments, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _pass_on(near: socket.socket, far: socket.socket, slow_seconds: float) -> None:
    time.sleep(slow_seconds)
    with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
        selector.register(near, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, near)
        while True:
            for key, _ in selector.select():
                source: socket.socket = key.fileobj  # type: ignore[assignment]
                chunk = source.recv(65_536)
                if not chunk:
                    _close(near)
                    _close(far)
                    return
                key.data.sendall(chunk)


@contextmanager
def proxy_to(port: int) -> Iterator[TcpProxy]:
    """Yield a proxy to `port`; it is closed at the end."""
    proxy = TcpProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
