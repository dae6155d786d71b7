"""Refuses a batch file that names pictures by paths.

A worker reads such a path from its disk. A client of this server must not name any, because it could be another
project's file.
"""

import json
from pathlib import Path
from typing import Any

from jobs.prompts.pictures import is_url
from tokenmill.server.errors import ApiError

#: The most bytes of a line that are looked at together. A worker takes no longer line.
PIECE_BYTES = (8 << 20) + 1
#: How compressed files begin. A worker would unpack them.
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh")


class _PathFound(Exception):
    """Raised where a line names a path."""


def refuse_picture_paths(path: Path) -> None:
    """Raise ApiError if a line of a file names a picture by a path, or the file is compressed. Raises OSError."""
    with path.open("rb") as file:
        if file.read(4).startswith(_COMPRESSED):
            raise _refused("the file is compressed: upload its lines as they are")
        file.seek(0)
        number = 0
        while line := file.readline(PIECE_BYTES):
            number += 1
            # A name may be written with escapes.
            if b"image_url" not in line and b"\\u" not in line:
                continue
            try:
                if not _check(line):
                    for part in line.split(b"\r"):
                        _check(part)
            except (_PathFound, RecursionError):
                raise _refused(
                    f"line {number} has a picture that is no data: URL: send data:image/...;base64,..."
                ) from None


def _check(text: bytes) -> bool:
    """Return whether a text is JSON. Raises _PathFound and RecursionError."""
    try:
        json.loads(text.decode("utf-8", "replace"), object_pairs_hook=_check_object)
    except ValueError:
        return False
    return True


def _check_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, value in pairs:
        url = value.get("url") if isinstance(value, dict) else value
        if name == "image_url" and isinstance(url, str) and not is_url(url):
            raise _PathFound
    return dict(pairs)


def _refused(message: str) -> ApiError:
    return ApiError(400, message, param="input_file_id")
