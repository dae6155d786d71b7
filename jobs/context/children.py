"""The children of a process that runs jobs: they render templates and read files."""

from sandbox import Pool

CHILDREN = Pool()
DECODERS = Pool()
"""Others, that decode pictures and see nothing else: formats' readers are in C."""
