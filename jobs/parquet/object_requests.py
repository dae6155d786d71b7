"""Requests to an object store: tried again while it does not serve, and what it says told by our errors."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from ..errors import PathSwapped
from .store_errors import BucketNotFound, StoreRefused, StoreUnreachable

T = TypeVar("T")

#: Of the time that a store has: for tries of one request inside obstore, and until which we begin another.
_SHARE = 0.25

#: Seconds between our own tries, and of one request at most.
FIRST_WAIT_S, MAX_WAIT_S, REQUEST_S = 0.2, 5.0, 30.0

_CODE, _MESSAGE = re.compile(r"<Code>([^<]*)</Code>"), re.compile(r"<Message>([^<]*)</Message>")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_TRY_AGAIN = {"408", "425", "429"}

#: Of what a store says, as much as is told.
_REASON_CHARS = 300


@lru_cache(maxsize=64)
def opened_store(scheme: str, bucket: str, timeout_s: float) -> Any:
    """Return a client of a bucket, which all threads share, with what the environment says of the store.

    timeout_s: in which it has to serve.
    """
    share, first = timedelta(seconds=timeout_s * _SHARE), timedelta(seconds=FIRST_WAIT_S)
    options: Any = {
        "retry_config": {
            "max_retries": 100,
            "retry_timeout": share,
            "backoff": {"init_backoff": min(share / 8, first), "max_backoff": share / 4, "base": 2},
        },
        "client_options": {
            "timeout": min(share, timedelta(seconds=REQUEST_S)),
            "connect_timeout": min(share, timedelta(seconds=REQUEST_S / 3)),
            "allow_http": _endpoint(scheme).startswith("http://"),
        },
    }
    if scheme == "s3":
        return S3Store(bucket, copy_if_not_exists="multipart", **options)
    return GCSStore(bucket, **options) if scheme == "gs" else AzureStore(bucket, **options)


def _endpoint(scheme: str) -> str:
    names = {"s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"), "az": ("AZURE_ENDPOINT",)}
    return next((os.environ[name] for name in names.get(scheme, ()) if os.environ.get(name)), "")


class Requests:
    """Makes requests, each again until it is answered, at most for a share of `timeout_s`.

    What is asked must bear being asked twice: a reply may be lost of what was done.
    """

    def __init__(
        self,
        check_interrupted: Callable[[], None],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.check_interrupted, self.timeout_s = check_interrupted, timeout_s
        self._clock, self._wait = clock, wait

    def make(self, path: str, request: Callable[[], T]) -> T:
        """Return what a request does. path: for the errors.

        Raises FileNotFoundError, FileExistsError, PathSwapped where an object is not the one that was looked
        at, StoreRefused, BucketNotFound, StoreUnreachable, or what check_interrupted does.
        """
        begun, wait_s = self._clock(), FIRST_WAIT_S
        while True:
            self.check_interrupted()
            try:
                return request()
            except (BaseError, FileNotFoundError, ValueError) as error:
                reason = self._reason_to_try_again(path, error)
                seconds = self._clock() - begun
                if seconds + wait_s > self.timeout_s * _SHARE:
                    raise StoreUnreachable(path, seconds, reason) from None
            self._wait(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _reason_to_try_again(self, path: str, error: Exception) -> str:
        """Return why the store has not served; raise an error of ours where another try would end alike."""
        text = str(error)
        code, status = _found(_CODE, text), _found(_STATUS, text)
        reason = f"{code}: {_found(_MESSAGE, text)}" if code else text.split("\n")[0]
        reason = reason[:_REASON_CHARS]
        if code in _NO_BUCKET:
            raise BucketNotFound(path, reason) from None
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        if isinstance(error, AlreadyExistsError):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        if isinstance(error, PreconditionError):
            raise PathSwapped(path, "another object came in its place") from None
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | ValueError):
            raise StoreRefused(path, reason) from None
        if status.startswith("4") and status not in _TRY_AGAIN:
            raise StoreRefused(path, reason) from None
        return reason


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
