"""HTTP servers that webhooks are sent to: one that remembers what it gets, and one that answers badly."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebhookServer(ThreadingHTTPServer):
    """Listens on a free port of this machine. location: where it redirects every request to."""

    daemon_threads = True

    def __init__(self, location: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.location = location

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: WebhookServer

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.headers.append(dict(self.headers))
        self.server.received.append(body)
        self.send_response(204 if self.server.location is None else 302)
        if self.server.location is not None:
            self.send_header("Location", self.server.location)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output clean."""


@contextmanager
def webhook_server(location: str | None = None) -> Iterator[WebhookServer]:
    with WebhookServer(location) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class TricklingServer:
    """Accepts connections and answers each with a byte of a header every 50 ms, until it is closed."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self._connections: list[socket.socket] = []
        self._ended = threading.Event()
        self.first = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._accept, self._trickle)]
        for thread in self._threads:
            thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            connection, _ = self._listener.accept()
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            self._connections.append(connection)
            self.first.set()

    def _trickle(self) -> None:
        while not self._ended.wait(0.05):
            for connection in list(self._connections):
                try:
                    connection.sendall(b"x")
                except OSError:
                    self._connections.remove(connection)
                    connection.close()

    def close(self) -> None:
        self._ended.set()
        with socket.create_connection(self._listener.getsockname()):
            for thread in self._threads:
                thread.join()
        for each in (*self._connections, self._listener):
            each.close()


@contextmanager
def trickling_server() -> Iterator[TricklingServer]:
    server = TricklingServer()
    try:
        yield server
    finally:
        server.close()
