"""Reads the paths in a job's arguments, before anything is looked up on a disk or in a store."""

import os
import re
from urllib.parse import unquote

from jobs.common.display import brief, is_unicode
from jobs.errors import InvalidJob, InvalidValue, UnsupportedScheme

#: Schemes of object stores: Amazon S3 and stores with its protocol, Google Cloud Storage, Azure Blob Storage.
STORES = ("s3", "gs", "az")

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def run_path(path: object) -> str:
    """Return the full path of a run's file or folder.

    A local path or file:// URI becomes an absolute path. A relative path counts from the working directory. A path in
    an object store becomes scheme://bucket/key, without a slash at its end. Raises UnsupportedScheme for other URIs,
    and InvalidJob for anything that is no path.
    """
    if not isinstance(path, str) or not path:
        raise InvalidValue("{} is no path: expected a non-empty string", brief(path))
    uri = _URI.fullmatch(path)
    if uri is not None:
        scheme, authority, uri_path, query = uri.groups()
        scheme = scheme.lower()
        _, _, host = authority.rpartition("@")
        # Errors show no user, password or query, because these may hold a store's keys. A password that is not encoded
        # may hold a slash, and so reach beyond the authority. So everything up to the URI's last @ is cut off.
        _, _, without_secrets = (authority + uri_path).rpartition("@")
        shown_uri = f"{scheme}://{without_secrets}"
        if scheme in STORES:
            return _stored_path(scheme, authority, uri_path, query, shown_uri)
        if scheme != "file":
            raise UnsupportedScheme(shown_uri, scheme)
        if host not in ("", "localhost"):
            raise UnsupportedScheme(f"file://{host}{uri_path}", f"file on host {host}")
        path = unquote(uri_path)
    _check_text(path)
    return os.path.abspath(path)


def is_stored(path: str) -> bool:
    """Whether a path is in an object store."""
    return path.partition("://")[0] in STORES


def real_path(path: str) -> str:
    """Return a local path without links. A store's path stays as it is."""
    return path if is_stored(path) else os.path.realpath(path)


def _stored_path(scheme: str, bucket: str, uri_path: str, query: str, shown_uri: str) -> str:
    """Return the path of an object in a store. Raises InvalidJob if the URI names no object.

    shown_uri: the URI without secrets, for errors.
    """
    if not _BUCKET.fullmatch(bucket) or query:
        raise InvalidJob(
            f"{shown_uri} is no object's path: write {scheme}://bucket/key, without user, password, '?' and '#'; "
            "keys for the store belong in the worker's environment"
        )
    key = uri_path.strip("/")
    if key and any(segment in ("", ".", "..") for segment in key.split("/")):
        raise InvalidJob(
            f"{shown_uri} has an empty segment, '.' or '..': name the object as the store lists it"
        )
    _check_text(key)
    return f"{scheme}://{bucket}/{key}".rstrip("/")


def _check_text(path: str) -> None:
    """Raise InvalidValue for a text that no file system takes as a path."""
    if "\0" in path or not is_unicode(path):
        raise InvalidValue("{} is no path: it holds a zero byte, or is not UTF-8", brief(path))
