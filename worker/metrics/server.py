"""The HTTP endpoint of a worker: /metrics, /livez and /readyz."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from worker.errors import MetricsNotServed
from worker.metrics.exporter import Exporter
from worker.metrics.health import EngineTurns, Health, IoTurns
from worker.metrics.shown import WatchedWorker

REQUEST_TIMEOUT_S = 5.0
"""A client that sends or takes nothing for so long is let go."""
MAX_REQUESTS = 8
"""At a time; a further one is turned away. So clients that hang cost the worker as many threads, no more."""


class MetricsServer:
    """Listens from the start on; says of the worker what there is. Raises MetricsNotServed.

    ports: the first free one is taken, so that workers with the same settings find one each.
    """

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self.health, self._exporter = Health(), Exporter()
        self._server = _listen(host, ports, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tokenmill-metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The one that was taken."""
        return int(self._server.server_address[1])

    def serve(self, worker: WatchedWorker, engine: EngineTurns, io: IoTurns) -> None:
        """The model is loaded: tell of this worker from now on."""
        self._exporter.serve(worker)
        self.health.serve(engine, io)

    def close(self) -> None:
        """Listen no more. Requests under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for a path."""
        text = "text/plain; charset=utf-8"
        if path == "/metrics":
            body, kind = self._exporter.exposition(accept)
            return HTTPStatus.OK, kind, body
        if path not in ("/livez", "/readyz"):
            return HTTPStatus.NOT_FOUND, text, b"/metrics, /livez and /readyz are here\n"
        amiss = self.health.why_dead() if path == "/livez" else self.health.why_not_ready()
        status = HTTPStatus.SERVICE_UNAVAILABLE if amiss else HTTPStatus.OK
        return status, text, f"{amiss or 'ok'}\n".encode()


class _Listener(ThreadingMixIn, HTTPServer):
    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    owner: MetricsServer

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which may wait for a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no concern of the log."""


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "tokenmill", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, kind, body = self.server.owner.answer(path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


def _listen(host: str, ports: Sequence[int], owner: MetricsServer) -> _Listener:
    for port in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = _Listener(family, (str(address[0]), port))
        except (OSError, UnicodeError) as error:
            reason = error
        else:
            listener.owner = owner
            return listener
    raise MetricsNotServed(host, ports[0], ports[-1], str(reason))
