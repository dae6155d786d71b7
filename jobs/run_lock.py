"""A lock in Redis that needs no scripts: producers hold it too, and may run none (`ops/redis-users.acl`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from redis.client import Pipeline
from redis.exceptions import LockNotOwnedError, WatchError
from redis.lock import Lock


class RunLock(Lock):
    """redis-py's lock, whose `release` and `reacquire` compare the token in a watched transaction."""

    def register_scripts(self) -> None:
        """None are needed."""

    def do_release(self, expected_token: Any) -> None:
        """Let go. Raises LockNotOwnedError where it has run out."""
        self._if_owned(expected_token, lambda pipe: pipe.delete(self.name))

    def do_reacquire(self) -> Literal[True]:
        """Hold it for its whole time again. Raises LockNotOwnedError where it has run out."""
        assert self.timeout is not None
        milliseconds = int(self.timeout * 1000)
        self._if_owned(self.local.token, lambda pipe: pipe.pexpire(self.name, milliseconds))
        return True

    def do_extend(self, additional_time: Any, replace_ttl: bool) -> Literal[True]:
        """Not offered: `reacquire` does what runs need."""
        raise NotImplementedError("a RunLock is held on with `reacquire`")

    def _if_owned(self, token: Any, change: Callable[[Pipeline], Any]) -> None:
        """Change the lock's key while it holds this token, or raise LockNotOwnedError."""
        with self.redis.pipeline() as pipe:
            while True:
                try:
                    pipe.watch(self.name)
                    if pipe.get(self.name) != token:
                        raise LockNotOwnedError("the lock has run out", lock_name=self.name)
                    pipe.multi()
                    change(pipe)
                    pipe.execute()
                except WatchError:  # it has changed hands, or the connection broke: look again
                    continue
                return
