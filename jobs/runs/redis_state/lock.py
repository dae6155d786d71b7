"""A lock in Redis that needs no scripts: producers hold it too, and may run none (`ops/redis-users.acl`)."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import LockNotOwnedError, WatchError
from redis.lock import Lock

T = TypeVar("T")


def transact(client: Redis, change: Callable[[Pipeline], T], *watched: str) -> T:
    """Return what `change` returns of a pipeline that watches these keys, once none changed under its hands.

    change: reads, calls `multi`, queues commands and executes them; is called again where a key has changed.
    """
    with client.pipeline() as pipe:
        while True:
            try:
                if watched:
                    pipe.watch(*watched)  # type: ignore[no-untyped-call]
                return change(pipe)
            except WatchError:  # changed meanwhile, or the connection broke: look again
                continue
            finally:
                pipe.reset()


class RunLock(Lock):
    """redis-py's lock; `release` and `reacquire` compare the token in a watched transaction."""

    def register_scripts(self) -> None:
        """Register none: none are needed."""

    def do_release(self, expected_token: Any) -> None:
        """Let go. Raises LockNotOwnedError where it has run out."""
        self._if_owned(expected_token, lambda pipe: pipe.delete(self.name))

    def do_reacquire(self) -> Literal[True]:
        """Hold it for its whole time again. Raises LockNotOwnedError where it has run out."""
        assert self.timeout is not None
        milliseconds = int(self.timeout * 1000)
        self._if_owned(self.local.token, lambda pipe: pipe.pexpire(self.name, milliseconds))
        return True

    @property
    def key(self) -> str:
        return str(self.name)

    def checked(self, change: Callable[[Pipeline], T], pipe: Pipeline) -> T:
        """Return what `change` returns. pipe: watches the lock's key. Raises LockNotOwnedError."""
        self._check(pipe, self.local.token)
        return change(pipe)

    def _check(self, pipe: Pipeline, token: Any) -> None:
        if pipe.get(self.name) != token:
            raise LockNotOwnedError("the lock has run out", lock_name=self.name)

    def _if_owned(self, token: Any, change: Callable[[Pipeline], Any]) -> None:
        """Change the lock's key while it holds this token, or raise LockNotOwnedError."""

        def checked(pipe: Pipeline) -> None:
            self._check(pipe, token)
            pipe.multi()
            change(pipe)
            pipe.execute()

        transact(self.redis, checked, self.key)
