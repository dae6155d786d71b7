"""The children of a process that runs jobs: they render templates and read files."""

from __future__ import annotations

from sandbox import Pool

CHILDREN = Pool()
