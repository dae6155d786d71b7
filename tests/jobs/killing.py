"""Kills an execution before or after its n-th file operation or Redis call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from jobs.parquet.storage import Storage


class Killed(BaseException):
    """Stands for SIGKILL: no handler for errors may catch it."""


class Fuse:
    """Raises Killed at step `burns_at`, counted from 0; None never burns."""

    def __init__(self, burns_at: int | None) -> None:
        self._left = burns_at
        self.burnt = False

    def tick(self) -> None:
        if self._left is None or self.burnt:
            return
        if self._left == 0:
            self.burnt = True
            raise Killed
        self._left -= 1

    @contextmanager
    def step(self) -> Iterator[None]:
        self.tick()
        yield
        self.tick()


class FusedStorage(Storage):
    """Storage whose changing operations are steps; after the kill nothing is cleaned up any more."""

    def __init__(self, roots: tuple[str, ...], fuse: Fuse) -> None:
        super().__init__(roots)
        self._fuse = fuse

    def make_folder(self, path: str) -> None:
        with self._fuse.step():
            super().make_folder(path)

    def open_output(self, path: str) -> Any:
        self._fuse.tick()
        opened = super().open_output(path)
        try:
            self._fuse.tick()
        except Killed:
            opened.close()  # as the system does for a process that was killed
            raise
        return opened

    def reopen_output(self, path: str) -> Any:
        self._fuse.tick()
        opened = super().reopen_output(path)
        try:
            self._fuse.tick()
        except Killed:
            opened.close()
            raise
        return opened

    def publish(self, temporary: str, target: str) -> bool:
        with self._fuse.step():
            return super().publish(temporary, target)

    def replace(self, temporary: str, target: str) -> bool:
        with self._fuse.step():
            return super().replace(temporary, target)

    def rename(self, path: str, target: str) -> bool:
        with self._fuse.step():
            return super().rename(path, target)

    def rewrite(self, path: str, contents: bytes) -> bool:
        with self._fuse.step():
            return super().rewrite(path, contents)

    def make_void(self, path: str, text: str) -> None:
        with self._fuse.step():
            super().make_void(path, text)

    def remove(self, path: str) -> bool:
        if self._fuse.burnt:
            return False
        with self._fuse.step():
            return super().remove(path)


class FusedRedis(Redis):
    """A client whose commands and transactions are steps."""

    def __init__(self, client: Redis, fuse: Fuse) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._fuse = fuse

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        with self._fuse.step():
            return super().execute_command(*arguments, **options)

    def pipeline(self, *arguments: Any, **options: Any) -> Any:
        pipe = super().pipeline(*arguments, **options)
        execute = pipe.execute

        def fused_execute(*args: Any, **kwargs: Any) -> Any:
            with self._fuse.step():
                return execute(*args, **kwargs)

        pipe.execute = fused_execute
        return pipe
