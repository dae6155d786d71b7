"""MetricsServer: serves a worker's /metrics, /livez and /readyz over HTTP."""

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple

from worker.errors import MetricsNotServed
from worker.metrics.exporter import Exporter
from worker.metrics.health import Health, WatchedEngine, WatchedIo
from worker.metrics.tally import Tally

REQUEST_S = 5.0
"""Seconds for a request and its response. After that the connection is closed."""

MAX_REQUESTS = 256
"""The most open connections. A further connection closes the oldest one, so that hanging connections keep nobody out.
The loop accepts 100 at once, so a new connection is read long before it is the oldest."""

_MAX_HEAD_BYTES = 16 << 10


class Response(NamedTuple):
    """The HTTP response to a request."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class MetricsServer:
    """Serves HTTP in one thread, on the first free port of `ports`. The constructor raises MetricsNotServed."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self.health = Health()
        self._exporter = Exporter()
        self._listener = _listen(host, ports)
        # The oldest connection is first.
        self._open_connections: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        self._close_requested = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._serve(),),
            name="tokenmill-metrics",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        _, port, *_ = self._listener.getsockname()
        return int(port)

    def serve(
        self,
        facts: Mapping[str, Any],
        queue_names: Sequence[str],
        counts: Tally,
        engine: WatchedEngine,
        io: WatchedIo,
    ) -> None:
        """Serve a worker's numbers from now on. Called when the worker's model is loaded.

        facts: the values of the worker's Redis key.
        """
        self._exporter.serve(facts, queue_names, counts)
        self.health.watch(engine, io)

    def close(self) -> None:
        """Stop listening, and close the connections of requests under way."""
        self._loop.call_soon_threadsafe(self._close_requested.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        """Serve requests until `close`."""
        server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=_MAX_HEAD_BYTES
        )
        await self._close_requested.wait()
        # Stop accepting connections first: `server.close` would leave a connection open that was accepted but is not
        # served yet.
        self._loop.remove_reader(self._listener)
        # Wait until only this task is left. Each accepted connection has a task, even if it is not served yet.
        while len(asyncio.all_tasks()) > 1:
            for writer in self._open_connections:
                writer.transport.abort()
            await asyncio.sleep(0)
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. If too many are open, close the oldest."""
        if len(self._open_connections) >= MAX_REQUESTS:
            oldest = next(iter(self._open_connections))
            del self._open_connections[oldest]
            oldest.transport.abort()
        self._open_connections[writer] = None
        try:
            with suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
                # These errors are the client's fault, so they are not logged.
                async with asyncio.timeout(REQUEST_S):
                    await self._answer(reader, writer)
        finally:
            self._open_connections.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one request and write the response."""
        head_bytes = await reader.readuntil(b"\r\n\r\n")
        request_line, *header_lines = head_bytes.decode("latin-1").split("\r\n")
        method, target, _ = request_line.split(" ")
        headers = {}
        for line in header_lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        response = Response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n")
        if method == "GET":
            path, _, _ = target.partition("?")
            response = self.answer(path, headers.get("accept", ""))
        head = (
            f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
            f"Content-Type: {response.content_type}\r\n"
            f"Content-Length: {len(response.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + response.body)
        writer.write_eof()
        await writer.drain()
        await reader.read()  # waits until the client has read the response and closes

    def answer(self, path: str, accept: str) -> Response:
        """Return the response for a path. accept: the request's Accept header."""
        if path == "/metrics":
            body, content_type = self._exporter.exposition(accept)
            return Response(HTTPStatus.OK, body, content_type)
        if path not in ("/livez", "/readyz"):
            return Response(HTTPStatus.NOT_FOUND, b"/metrics, /livez and /readyz are here\n")
        if path == "/livez":
            problem = self.health.why_dead()
            warning = ""
        else:
            problem = self.health.why_not_ready()
            warning = self.health.warning()
        if problem:
            return Response(HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n".encode())
        if warning:
            return Response(HTTPStatus.OK, f"ok, but {warning}\n".encode())
        return Response(HTTPStatus.OK, b"ok\n")


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first port that is free. Raises MetricsNotServed."""
    for port in ports:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, address = addresses[0]
            host_and_port = address[:2]  # an address of IPv6 has two more fields
            return socket.create_server(host_and_port, family=family, backlog=1024)
        except (OSError, UnicodeError) as error:
            last_error = error
    port_text = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    raise MetricsNotServed(host, port_text, last_error)
