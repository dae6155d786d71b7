"""Names the key of a run that is of another type than is kept there: any producer may have written it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from jobs.common.keys import run_errors_key, run_failed_key, run_key, run_lock_key, run_parts_key
from jobs.errors import RunKeyDamaged

if TYPE_CHECKING:
    from redis import Redis


def key_types(run: str) -> dict[str, str]:
    """Return a run's keys, and the type of each."""
    hashes = (run_key(run), run_parts_key(run), run_errors_key(run))
    return {**dict.fromkeys(hashes, "hash"), run_failed_key(run): "set", run_lock_key(run): "string"}


@contextmanager
def wrong_types_told(client: Redis, types: Mapping[str, str]) -> Iterator[None]:
    """Raise RunKeyDamaged where Redis refuses the body's commands because a key is not of its type.

    types: of the keys that the body uses. A key that is none of them is as if this were not there.
    """
    try:
        yield
    except ResponseError as error:
        if "WRONGTYPE" in str(error):
            for key, expected in types.items():
                found: Any = client.type(key)
                if found not in (b"none", expected.encode()):
                    raise RunKeyDamaged(key, found.decode(), expected) from error
        raise


def check_lock(client: Redis, run: str) -> None:
    """Raise RunKeyDamaged for a lock that never would be free: nobody is to wait for it."""
    key = run_lock_key(run)
    with wrong_types_told(client, {key: "string"}), client.pipeline() as pipe:
        pipe.get(key)
        pipe.ttl(key)
        _, left_s = pipe.execute()
    if left_s == -1:
        raise RunKeyDamaged(key, "string without an end", "string that ends by itself")
