"""Decodes the pictures of a prompt into arrays, just before the prompt is prepared.

Until then a request holds the bytes of the picture files. Decoded pictures take many times as much memory.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine import InvalidRequest
from jobs.errors import InvalidJob
from jobs.prompts.pictures import MAX_PIXELS, decode, filled, pictures_in


def has_pictures(value: Any) -> bool:
    """Return whether a prompt, or a list of messages, holds pictures."""
    has_parts = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return has_parts and bool(pictures_in(value))


def decode_pictures(value: Any) -> Any:
    """Return messages, or the parts of a prompt, with their pictures as arrays. Any other prompt stays as it is.

    An array has the shape [height, width, 3] and the type uint8. Raises InvalidRequest if a file is no picture, or if
    the pictures have more pixels than a prompt may have.
    """
    if not has_pictures(value):
        return value
    arrays = list[npt.NDArray[np.uint8]]()
    pixels_left = MAX_PIXELS
    for number, file in enumerate(pictures_in(value), 1):
        try:
            picture = decode(file, f"picture {number}", pixels_left)
        except InvalidJob as error:
            raise InvalidRequest(str(error)) from None
        pixels = np.frombuffer(picture.rgb, np.uint8)
        arrays.append(pixels.reshape(picture.height, picture.width, 3))
        pixels_left -= picture.height * picture.width

    messages_or_parts = filled(value, arrays)
    is_chat = "role" in messages_or_parts[0]
    if is_chat:
        return messages_or_parts
    # The engine takes the texts and pictures themselves, not the JSON objects that hold them.
    return [part["text"] if "text" in part else part["image"] for part in messages_or_parts]
