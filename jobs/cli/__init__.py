"""The `tokenmill` command line."""

from jobs.cli.commands import main

__all__ = ["main"]
