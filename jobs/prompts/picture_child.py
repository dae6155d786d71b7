"""Decodes pictures in a child process. A picture's size is checked before any pixel is decoded."""

import io
import os
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from sandbox.child import Body, Worker

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

Image.init()  # imports the readers of all formats now, outside the limits of a task
Image.MAX_IMAGE_PIXELS = None  # each question has its own limit
# Readers complain about odd files on stderr. The worker's log does not need that.
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def decode(worker: Worker) -> Iterator[tuple[dict[str, Any], Body]]:
    """Reply with the size of a picture and its pixels as RGB, or with why it cannot be decoded.

    worker: sends a question with `max_pixels`, and the picture's file as the question's body.
    """
    try:
        picture_or_problem = _decoded(worker.body, worker.question["max_pixels"])
    except MemoryError:  # the child's memory limit is to blame, and not the file
        raise
    except Exception as error:  # noqa: BLE001  # a broken file may raise any error
        picture_or_problem = f"cannot be decoded: {type(error).__name__}: {str(error)[:200]}"

    if isinstance(picture_or_problem, str):
        yield {"problem": picture_or_problem}, b""
    else:
        picture = picture_or_problem
        yield {"width": picture.width, "height": picture.height}, picture.tobytes()


def _decoded(file: bytearray, max_pixels: int) -> Image.Image | str:
    """Return a picture as RGB, or why it cannot be decoded: a text that begins with a verb, such as "has"."""
    try:
        picture: Image.Image = Image.open(io.BytesIO(file), formats=_FORMATS)
    except UnidentifiedImageError:
        return f"is no picture of the formats {', '.join(_FORMATS)}"
    if picture.width * picture.height > max_pixels:
        return f"has {picture.width} x {picture.height} pixels, more than the {max_pixels} that its prompt has left"
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):
        # Pillow would cut off greys above 255, and so make nearly all of 65,536 greys white. 65,535 / 257 is 255.
        picture = picture.convert("I").point(lambda value: value / 257).convert("L")
    if picture.mode in ("I", "F"):
        return "has pixels of 32 bits, and does not say which is white: write it in 8 or 16 bits"
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")
