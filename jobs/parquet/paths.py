"""Paths as a job may write them, before anything is looked up on a disk."""

import os
import re
from urllib.parse import unquote, urlsplit

from ..errors import InvalidJob, UnsupportedScheme

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def local_path(path: object) -> str:
    """Return a local path or file:// URI as an absolute path; relative ones start at the working directory.

    Raises UnsupportedScheme for other URIs, InvalidJob for what is no path at all.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidJob(f"{path!r} is no path: expected a non-empty string")
    match = _SCHEME.match(path)
    if match is None:
        return os.path.abspath(path)
    if match[1].lower() != "file":
        raise UnsupportedScheme(path, match[1].lower())
    parts = urlsplit(path)
    if parts.netloc not in ("", "localhost"):
        raise UnsupportedScheme(path, f"file on host {parts.netloc}")
    return os.path.abspath(unquote(parts.path))
