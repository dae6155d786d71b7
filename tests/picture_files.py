"""Files of pictures, good and bad ones, for tests."""

import io
import struct
import zlib
from base64 import b64encode
from typing import Any

from PIL import Image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def picture(
    color: tuple[int, ...] = RED, size: tuple[int, int] = (4, 2), kind: str = "PNG", **how: Any
) -> bytes:
    """Return a file of one color."""
    file, mode = io.BytesIO(), "RGBA" if len(color) == 4 else "RGB"
    Image.new(mode, size, color).save(file, kind, **how)
    return file.getvalue()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{b64encode(file).decode()}"


def bomb(width: int = 50_000, height: int = 50_000) -> bytes:
    """Return a PNG of few bytes that stands for many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def broken() -> list[bytes]:
    """Return ten files that are no pictures."""
    whole = picture(size=(64, 64), kind="JPEG")
    return [
        bomb(),
        whole[: len(whole) // 2],
        picture(size=(64, 64))[:60],
        b"",
        b"no picture at all",
        b"%PDF-1.7\n",
        b"GIF89a",
        picture(kind="WEBP")[:20],
        picture(kind="TIFF")[:30],
        b"BM" + bytes(100),
    ]
