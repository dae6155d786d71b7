"""Sends requests to API servers and times their answers.

It speaks HTTP/1.1 by hand, as a client's own work is not what is measured.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Bytes of an upload that are sent at once.
PIECE_BYTES = 1 << 20


@dataclass
class Timings:
    """What came of requests. Times are in seconds, one for each request, of gaps one for each event after the first."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Connection:
    """One connection, which sends a request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: str) -> "Connection":
        """Connect to `http://host:port`."""
        host, _, port = address.removeprefix("http://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 22))

    async def post(self, path: str, body: Mapping[str, Any], timings: Timings) -> None:
        """Ask, and note how long it took. An answer other than 200 is a failure."""
        began_at = time.perf_counter()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        try:
            answer_head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
            status = answer_head.split(b" ", 2)[1]
            if b"transfer-encoding: chunked" in answer_head:
                content = await self._events(began_at, timings)
            else:
                length = int(answer_head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
                content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            timings.failures.append(type(error).__name__)
            return
        timings.whole_s.append(time.perf_counter() - began_at)
        timings.bodies.append(content)
        if status != b"200":
            timings.failures.append(content.decode(errors="replace")[:200])

    async def _events(self, began_at: float, timings: Timings) -> bytes:
        pieces: list[bytes] = []
        last_at = None
        while True:
            length = int(await self._reader.readuntil(b"\r\n"), 16)
            piece = await self._reader.readexactly(length + 2)
            if not length:
                return b"".join(pieces)
            pieces.append(piece[:-2])
            now = time.perf_counter()
            if last_at is None:
                timings.first_s.append(now - began_at)
            else:
                timings.gaps_s.append(now - last_at)
            last_at = now

    async def upload(self, path: str, num_bytes: int) -> bytes:
        """Upload a file of zeros; return the answer."""
        boundary = "boundary"
        start = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        ).encode()
        end = f"\r\n--{boundary}--\r\n".encode()
        total = len(start) + num_bytes + len(end)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {total}\r\n"
            f"content-type: multipart/form-data; boundary={boundary}\r\n\r\n"
        )
        self._writer.write(head.encode() + start)
        piece = bytes(PIECE_BYTES)
        for _ in range(num_bytes // PIECE_BYTES):
            self._writer.write(piece)
            await self._writer.drain()
        self._writer.write(end)
        head_bytes = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head_bytes.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        return await self._reader.readexactly(length)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def closed_loop(
    addresses: Sequence[str], path: str, body: Mapping[str, Any], num_clients: int, seconds: float
) -> Timings:
    """Have clients ask again as soon as they are answered. Clients are spread over the servers."""
    timings = Timings()
    connections = await _open(addresses, num_clients)
    until = time.perf_counter() + seconds

    async def ask(connection: Connection) -> None:
        while time.perf_counter() < until:
            await connection.post(path, body, timings)

    await asyncio.gather(*map(ask, connections))
    for connection in connections:
        connection.close()
    return timings


async def once_each(
    addresses: Sequence[str], path: str, bodies: Sequence[Mapping[str, Any]]
) -> Timings:
    """Ask each body once, all at the same time."""
    timings = Timings()
    connections = await _open(addresses, len(bodies))
    asked = zip(connections, bodies, strict=True)
    await asyncio.gather(*(connection.post(path, body, timings) for connection, body in asked))
    for connection in connections:
        connection.close()
    return timings


async def _open(addresses: Sequence[str], num_clients: int) -> list[Connection]:
    connections = []
    for number in range(num_clients):
        connections.append(await Connection.open(addresses[number % len(addresses)]))
    return connections
