"""What a job ended with, read within bounds: a result that anybody wrote may unpack to gigabytes."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.common import stored
from jobs.common.rq_jobs import results_key

if TYPE_CHECKING:
    from redis import Redis

#: Of an error's text, unpacked; a worker writes far less.
MAX_ERROR_BYTES = 1 << 20


def last_error(connection: Redis, job_id: str) -> str:
    """Return the text of a job's last error; "" where it left none that can be read."""
    return error_text(_last_entry(connection, job_id))


def error_text(entry: Mapping[bytes, bytes]) -> str:
    """Return the error in an entry of a job's results; "" where it has none that can be read."""
    return stored.text(stored.unpacked(_decoded(entry, b"exc_string"), MAX_ERROR_BYTES) or b"")


def last_value(connection: Redis, job_id: str) -> dict[str, Any]:
    """Return the object that a job returned last; {} where it returned none that can be read."""
    return stored.json_object(last_result(connection, job_id))


def last_result(connection: Redis, job_id: str) -> bytes:
    """Return the JSON of what a job returned last, of any size; b"" where it returned nothing."""
    return _decoded(_last_entry(connection, job_id), b"return_value")


def _last_entry(connection: Redis, job_id: str) -> Mapping[bytes, bytes]:
    entries: Any = connection.xrevrange(results_key(job_id), count=1)
    return entries[0][1] if entries else {}


def _decoded(entry: Mapping[bytes, bytes], field: bytes) -> bytes:
    """Return a field of a job's result, as it was before RQ coded it as text."""
    try:
        return b64decode(entry.get(field) or b"")
    except binascii.Error:
        return b""
