"""Speaks TLS on a port that it prints, and passes what it hears to a server's unix socket, until it is ended."""

import asyncio
import ssl
import sys


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        pass  # either side may go away at any time
    finally:
        writer.close()


async def _serve(certificate: str, key: str, server: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_unix_connection(server)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_server), _pump(from_server, writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as listening:
        print(listening.sockets[0].getsockname()[1], flush=True)
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
