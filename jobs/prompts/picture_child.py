"""What a child does that decodes pictures; their sizes are looked at before any pixel is."""

import io
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from sandbox.child import Body, Worker

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

Image.init()  # imports all formats' readers, within no task's limits
Image.MAX_IMAGE_PIXELS = None  # the worker says how many
warnings.simplefilter("ignore")  # what is odd about a file is no matter for the worker's log


class _Refused(Exception):
    """Raised for a picture that is not decoded."""


def decode(worker: Worker) -> Iterator[tuple[dict[str, Any], Body]]:
    """Reply the size of a picture, and its pixels as RGB; or the problem with it. most: pixels that it may have."""
    try:
        picture = _decoded(worker.body, worker.question["most"])
    except MemoryError:
        raise
    except _Refused as problem:
        yield {"problem": str(problem)}, b""
    except Exception as error:  # noqa: BLE001  # a broken file raises what its format's reader likes
        yield {"problem": f"cannot be decoded: {type(error).__name__}: {str(error)[:200]}"}, b""
    else:
        yield {"width": picture.width, "height": picture.height}, picture.tobytes()


def _decoded(file: bytearray, most: int) -> Image.Image:
    """Return the first frame, turned as its camera says, over white where it is transparent."""
    try:
        picture: Image.Image = Image.open(io.BytesIO(file), formats=_FORMATS)
    except UnidentifiedImageError:
        raise _Refused(f"is no picture of the formats {', '.join(_FORMATS)}") from None
    width, height = picture.size
    if width * height > most:
        raise _Refused(f"has {width} x {height} pixels, more than the {most} that its prompt has left")
    picture = ImageOps.exif_transpose(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")
