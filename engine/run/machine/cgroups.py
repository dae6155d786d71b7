"""The cgroups around this process: where the kernel says what they allow. Source: cgroups(7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, ROOT = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """folder: of its files.  version: 1 or 2, whose files have other names."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """One of its files; "" where there is none."""
        try:
            return (self.folder / name).read_text().strip()
        except OSError:
            return ""


def cgroups_of(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[Cgroup]:
    """List the cgroups by which a controller, such as "memory", may limit this process, the innermost first.

    The paths are parameters for tests. None outside Linux.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (root / controller, 1) if controllers else (root, 2)
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(base):
                yield Cgroup(folder, version)
