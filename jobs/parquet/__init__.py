"""A run's files: planning by their footers, reading rows, writing parts, the check that every row is there.

The one room that imports pyarrow. Nothing at the top of this package or of shard_task.py does: a worker
builds a task before that task reads a file.
"""
