"""Paths as a job may write them, before anything is looked up on a disk."""

import os
import re
from urllib.parse import unquote

from ..common.shown import shown
from ..errors import InvalidValue, UnsupportedScheme

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)", re.DOTALL)


def local_path(path: object) -> str:
    """Return a local path or file:// URI as an absolute path; relative ones start at the working directory.

    Raises UnsupportedScheme for other URIs, InvalidJob for what is no path at all.
    """
    if not isinstance(path, str) or not path:
        raise InvalidValue("{} is no path: expected a non-empty string", shown(path))
    if uri := _URI.match(path):
        scheme, host, path = uri[1].lower(), uri[2].rpartition("@")[2], uri[3]
        if scheme != "file":
            # Without user, password and query, which may hold the keys of an object store; a key that was
            # not encoded may hold a slash.
            raise UnsupportedScheme(f"{scheme}://{(uri[2] + uri[3]).rpartition('@')[2]}", scheme)
        if host not in ("", "localhost"):
            raise UnsupportedScheme(f"file://{host}{path}", f"file on host {host}")
        path = unquote(path)
    if "\0" in path or not _is_utf8(path):
        raise InvalidValue("{} is no path: it holds a zero byte, or is not UTF-8", shown(path))
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise InvalidValue(
            "{} is relative to a working directory that is gone: give an absolute path", shown(path)
        ) from None


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
