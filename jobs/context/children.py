"""The children of a process that runs jobs: they render templates and read files."""

from sandbox import Pool

CHILDREN = Pool()
