"""A proxy before an HTTP server that can be told to answer 500 in its place."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class FailingProxy(ThreadingHTTPServer):
    """Hands requests on to `target` (`http://host:port`), and answers 500 while `is_failing`."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target)
        self.is_failing = False
        self.failures = 0

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FailingProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.is_failing:
            self.server.failures += 1
            self._answer(500, [], b"")
            return
        # The host stays the client's, which its signature covers.
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        connection = http.client.HTTPConnection(self.server.target.netloc, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 (http.server's names)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value
            elif name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        """Log nothing."""


@contextmanager
def failing_proxy(target: str) -> Iterator[FailingProxy]:
    """Run a proxy before `target` until the block ends."""
    with FailingProxy(target) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
