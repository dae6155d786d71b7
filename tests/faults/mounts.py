"""Small file systems of their own, to fill up. Needs the right to mount."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path


class MountRefused(Exception):
    """This process may not mount a tmpfs: it is not root, or its container forbids it."""


class Mounts:
    """Mounts that are gone when it is closed."""

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def tmpfs(self, folder: Path, kilobytes: int) -> Path:
        """Mount a new tmpfs of this size at a new folder. Raises MountRefused."""
        folder.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tokenmill-faults", str(folder))
        self._folders.append(folder)
        return folder

    def change(self, folder: Path, options: str) -> None:
        """Mount it anew with other options, such as `ro` or a size; waits until no file is open to write."""
        for _ in range(400):
            with suppress(MountRefused):
                return self._mount("-o", f"remount,{options}", str(folder))
            time.sleep(0.005)
        raise MountRefused(f"{folder} was busy for too long to become {options}")

    def close(self) -> None:
        """Take all of them away, also those that are still in use."""
        for folder in self._folders:
            subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)
        self._folders.clear()

    def _mount(self, *arguments: str) -> None:
        try:
            done = subprocess.run(
                ["mount", *arguments], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise MountRefused(str(error)) from error
        if done.returncode:
            raise MountRefused(done.stderr.strip())
