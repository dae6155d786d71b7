"""What a child does that decodes pictures; their sizes are looked at before any pixel is."""

import io
import os
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from sandbox.child import Body, Worker

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

Image.init()  # imports all formats' readers, within no task's limits
Image.MAX_IMAGE_PIXELS = None  # the worker says how many
os.dup2(
    os.open(os.devnull, os.O_WRONLY), 2
)  # what is odd about a file is no matter for the worker's log


def decode(worker: Worker) -> Iterator[tuple[dict[str, Any], Body]]:
    """Reply the size of a picture, and its pixels as RGB; or the problem with it. most: pixels that it may have."""
    try:
        found = _decoded(worker.body, worker.question["most"])
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a broken file raises what its format's reader likes
        found = f"cannot be decoded: {type(error).__name__}: {str(error)[:200]}"
    if isinstance(found, str):
        yield {"problem": found}, b""
    else:
        yield {"width": found.width, "height": found.height}, found.tobytes()


def _decoded(file: bytearray, most: int) -> Image.Image | str:
    try:
        picture: Image.Image = Image.open(io.BytesIO(file), formats=_FORMATS)
    except UnidentifiedImageError:
        return f"is no picture of the formats {', '.join(_FORMATS)}"
    if picture.width * picture.height > most:
        return f"has {picture.width} x {picture.height} pixels, more than the {most} that its prompt has left"
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith(
        "I;16"
    ):  # Pillow would make all but the darkest of 65,536 greys white
        picture = picture.convert("I").point(lambda value: value / 257).convert("L")
    if picture.mode in ("I", "F"):
        return "has pixels of 32 bits, and does not tell which is white: write it in 8 or 16 bits"
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")
