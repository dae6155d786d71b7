"""Stands between a worker and Redis and loses replies: the command was carried out, nobody hears of it."""

import asyncio
import random
from pathlib import Path


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random, loss: float
) -> None:
    """Pass bytes on until either side ends; with probability `loss` a chunk is dropped and the line cut."""
    while chunk := await reader.read(1 << 16):
        if rng.random() < loss:
            return
        writer.write(chunk)
        await writer.drain()


async def _serve(listen: str, server: str, loss: float, seed: int) -> None:
    rng = random.Random(seed)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_unix_connection(server)
        there = asyncio.create_task(_pump(reader, to_writer, rng, 0.0))
        back = asyncio.create_task(_pump(to_reader, writer, rng, loss))
        await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        for end in (there, back):
            end.cancel()
        for line in (writer, to_writer):
            line.close()

    async with await asyncio.start_unix_server(connected, listen) as running:
        await running.serve_forever()


def lose_replies(listen: Path, server: Path, loss: float, seed: int) -> None:
    """Serve until killed; the target of a process of its own."""
    asyncio.run(_serve(str(listen), str(server), loss, seed))
