"""Sends requests to an object store, and repeats them while the store does not answer.

Listings are made in a child process, because obstore keeps all of a listing in memory.
"""

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from jobs.context import never_interrupted
from jobs.errors import PathSwapped
from jobs.parquet.files.filesystem import BucketNotFound, StoreRefused, StoreUnreachable
from sandbox.child import Worker

T = TypeVar("T")
#: No try of a request begins after this share of a store's time limit.
_SHARE_FOR_TRIES = 0.5
#: The seconds for obstore's own tries, if we can repeat the request ourselves.
TRIES_S = 5.0
#: The pause before our first new try. It doubles up to MAX_WAIT_S.
FIRST_WAIT_S = 0.2
MAX_WAIT_S = 5.0
#: The most seconds of one request.
REQUEST_S = 30.0
#: Only the code or the status of a store's reply is shown, never its text.
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
#: The part of obstore's error that comes before the text of the store's reply.
_BEFORE_A_REPLY = re.compile(r".*?(status code: \d{3}[ \w]*|error response|invalid \w+ response)")
#: The codes by which stores say that they have no such bucket.
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
#: The statuses from 400 to 499 after which the same request may succeed later.
_TRY_AGAIN = {"408", "425", "429"}

_REASON_CHARS = 300
_log = logging.getLogger("rq.worker")


@lru_cache(maxsize=64)
def opened_store(scheme: str, bucket: str, timeout_s: float, tries_s: float = TRIES_S) -> Any:
    """Return a client of a bucket, for all threads.

    timeout_s: the time limit of one call. tries_s: the time limit of obstore's own retries within that call.
    """
    time_for_tries = timedelta(seconds=timeout_s * _SHARE_FOR_TRIES)
    options: Any = {
        "retry_config": {
            "max_retries": 100,  # never reached, because `retry_timeout` ends the retries earlier
            "retry_timeout": min(time_for_tries, timedelta(seconds=tries_s)),
        },
        "client_options": {
            "timeout": min(time_for_tries, timedelta(seconds=REQUEST_S)),
            "allow_http": _endpoint(scheme).startswith("http://"),
        },
    }
    if scheme == "s3":
        return S3Store(bucket, copy_if_not_exists="multipart", **options)
    if scheme == "gs":
        return GCSStore(bucket, **options)
    return AzureStore(bucket, **options)


_ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "az": ("AZURE_ENDPOINT",),
}


def _endpoint(scheme: str) -> str:
    """Return the store's URL from the environment; "" if the environment has none.

    A store without such a URL is the vendor's own.
    """
    for name in _ENDPOINT_VARIABLES.get(scheme, ()):
        value = os.environ.get(name)
        if value:
            return value
    return ""


def make_request(
    path: str,
    request: Callable[[], T],
    check_interrupted: Callable[[], None] = never_interrupted,
    timeout_s: float = 0,
) -> T:
    """Make a request again and again until it is answered, and return the answer.

    timeout_s: the time limit of all tries together. No new try begins in the second half of this time, which is left
    for the last try. With 0, there is only one try.
    Raises FileNotFoundError, FileExistsError, StoreRefused, BucketNotFound, StoreUnreachable, or what check_interrupted
    raises. Raises PathSwapped if the object has changed since it was opened.
    """
    began_at = time.monotonic()
    wait_s = FIRST_WAIT_S
    has_warned = False
    while True:
        check_interrupted()
        try:
            answer = request()
        except (exceptions.BaseError, FileNotFoundError, ValueError) as error:
            reason = _reason_to_try_again(path, error)
            seconds = time.monotonic() - began_at
            if seconds + wait_s > timeout_s * _SHARE_FOR_TRIES:
                raise StoreUnreachable(path, seconds, reason) from None
            is_slow = seconds > TRIES_S
            if is_slow and not has_warned:
                has_warned = True
                _log.warning(
                    "the store of %s has not answered for %.0f s (%s): trying again",
                    path,
                    seconds,
                    reason,
                )
        else:
            seconds = time.monotonic() - began_at
            if seconds > TRIES_S:
                _log.warning("the store of %s has answered after %.0f s", path, seconds)
            return answer
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def make_upload_request(
    path: str, request: Callable[[], T], check_interrupted: Callable[[], None] = never_interrupted
) -> T:
    """Make one of an upload's requests, and return the answer. Raises the errors of make_request.

    The request is tried only once here, because only obstore can repeat it.
    If the store refuses the last piece, obstore's writer raises OSError with the whole text of the reply.
    """

    def translated_request() -> T:
        """Make the request. Turn the writer's OSError into an error that `make_request` understands."""
        try:
            return request()
        except OSError as error:
            raise exceptions.GenericError(str(error)) from None

    return make_request(path, translated_request, check_interrupted, timeout_s=0)  # no second try


def _reason_to_try_again(path: str, error: Exception) -> str:
    """Return why the store has not answered. If another try would end in the same way, raise one of our errors."""
    text = str(error)
    code = _first_group(_CODE, text)
    status = _first_group(_STATUS, text)
    first_line = text.split("\n")[0]
    before_reply = _BEFORE_A_REPLY.match(first_line)
    if before_reply is not None:
        first_line = before_reply[0]
    reason = (code or first_line)[:_REASON_CHARS]

    # The store's code says more than the class of the error, so the code is looked at first.
    if code in _NO_BUCKET:
        raise BucketNotFound(path, reason) from None
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    if isinstance(error, exceptions.AlreadyExistsError):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    if isinstance(error, exceptions.PreconditionError):
        raise PathSwapped(path, "another object came in its place") from None
    if isinstance(
        error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError | ValueError
    ):
        raise StoreRefused(path, reason) from None
    if status.startswith("4") and status not in _TRY_AGAIN:
        raise StoreRefused(path, reason) from None
    return reason


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    """Return the group of the pattern's first match in a text; "" if there is no match."""
    match = pattern.search(text)
    return match[1] if match else ""


#: In a child process: the environment variables that the last question has set.
_environment: dict[str, str] = {}


#: The kinds of questions about a prefix, see has_any and level_of.
HAS_ANY = "has_any"
LEVEL = "level"


def list_prefix(worker: Worker) -> Iterator[dict[str, Any]]:
    """Answer a question about a prefix, in a child process.

    The question holds the parent's environment variables for stores.
    """
    global _environment
    question = worker.question
    if question["environment"] != _environment:
        opened_store.cache_clear()  # a client keeps the credentials with which it was made
        for name in _environment:
            os.environ.pop(name, None)
        _environment = question["environment"]
        os.environ.update(_environment)
    store = opened_store(question["scheme"], question["bucket"], question["timeout_s"])
    try:
        yield {"answer": answer_about(store, question["kind"], question["key"])}
    except (exceptions.BaseError, FileNotFoundError, ValueError) as error:
        yield {"raised": type(error).__name__, "text": str(error)}


def answer_about(store: Any, kind: str, key: str) -> bool | dict[str, Any]:
    """Answer a question about a prefix. kind: HAS_ANY or LEVEL."""
    return has_any(store, key) if kind == HAS_ANY else level_of(store, key)


def has_any(store: Any, key: str) -> bool:
    """Whether there is any object below a prefix. key: the prefix; "" for the whole bucket."""
    chunks = iter(obstore.list(store, key or None, chunk_size=1))
    first_chunk = next(chunks, None)
    return first_chunk is not None


def level_of(store: Any, key: str) -> dict[str, Any]:
    """Return the `folders` of a prefix, and its `objects` with the Unix nanoseconds at which each was written."""
    level = obstore.list_with_delimiter(store, key or None)
    objects = {}
    for entry in level["objects"]:
        objects[entry["path"]] = int(entry["last_modified"].timestamp() * 1e9)
    return {"folders": list(level["common_prefixes"]), "objects": objects}
