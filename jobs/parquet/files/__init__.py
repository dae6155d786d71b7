"""Reaches a run's files, on a disk or in an object store."""
