"""The children of a process that runs jobs."""

from __future__ import annotations

from sandbox import Pool

#: What renders the templates of jobs and runs.
RENDERERS = Pool()
