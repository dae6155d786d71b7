"""Loads the scripts in `lua/` into Redis, and runs many of them in one round trip."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import NoScriptError, RedisError

from jobs.common.keys import OWN, RQ

_SCRIPTS = {
    "claim": ["shared/job_hash", "shared/open_execution"],
    "renew": [],
    "finish": ["shared/rate_limit", "shared/end_execution"],
    "retry": ["shared/rate_limit", "shared/end_execution"],
    "close": ["shared/rate_limit", "shared/end_execution"],
    "queue_dependent": ["shared/rate_limit"],
    "rate_limits": ["shared/rate_limit"],
    "release": ["shared/job_hash", "shared/open_execution"],
    "progress": [],
    "text": [],
    "adopt": ["shared/job_hash", "shared/open_execution"],
    "reorder": [],
    "enqueue_due": ["shared/rate_limit"],
}
"""The shared files that each script needs. They stand before the script, after the file that all scripts need."""

_HEAD = "shared/holding"
"""The shared file that stands before every script."""


@cache
def _sources() -> Mapping[str, str]:
    """Return the whole text of each script."""
    folder = resources.files("worker.store") / "lua"
    sources = {}
    for name, shared_files in _SCRIPTS.items():
        files = (_HEAD, *shared_files, name)
        texts = [(folder / f"{file}.lua").read_text() for file in files]
        sources[name] = _with_prefix("".join(texts))
    return sources


def _with_prefix(text: str) -> str:
    """Return a script with the operator's prefixes in its keys. RQ allows no prefix that would end a string in Lua."""
    return text.replace("'rq:", f"'{RQ}:").replace("'tokenmill:", f"'{OWN}:")


class Call(NamedTuple):
    """A call of a script. args: its arguments by name, sent as JSON. raw: further arguments, sent as they are."""

    script: str
    args: Mapping[str, Any]
    raw: Sequence[Any] = ()


class Scripts:
    """Runs the scripts on one server. Not thread-safe.

    bounds: numbers for the scripts, by the names of the Lua variables that get them.
    """

    def __init__(self, client: Redis, bounds: Mapping[str, int] | None = None) -> None:
        self._client = client
        lines = [f"local {name} = {number}\n" for name, number in (bounds or {}).items()]
        self._bounds = "".join(lines)
        self._shas: dict[str, str] = {}  # by script, once they are loaded

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in one round trip. Returns their replies, in the order of the calls. Raises RedisError.

        If the server lacks a script, all scripts are loaded, and the calls without a reply are sent again.
        """
        if not self._shas:
            self._load()
        replies: list[Any] = [None] * len(calls)
        unanswered = list(range(len(calls)))  # positions of calls
        while unanswered:
            with self._client.pipeline(transaction=False) as pipe:
                for i in unanswered:
                    name, args, raw = calls[i]
                    pipe.evalsha(self._shas[name], 0, json.dumps(args), *raw)
                new_replies = pipe.execute(raise_on_error=False)
            for i, reply in zip(unanswered, new_replies, strict=True):
                replies[i] = reply
            unanswered = [i for i in unanswered if isinstance(replies[i], NoScriptError)]
            if unanswered:  # the server was restarted or its scripts were flushed
                self._load()

        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    def _load(self) -> None:
        """Load all scripts into the server, and remember their hashes."""
        shas = {}
        for name, text in _sources().items():
            shas[name] = self._client.script_load(self._bounds + text)
        self._shas = shas
