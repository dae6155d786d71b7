"""Parquet runs: a plan, its shards, their parts, and the check that every row is there once.

Nothing at the top of this package or of shard_task.py imports pyarrow: a worker builds a task before that
task reads a file.
"""
