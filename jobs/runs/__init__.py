"""Parquet runs as far as no file is read: arguments, plan, state in Redis, jobs, and what is told of them.

Nothing here imports pyarrow: the command line submits, follows and cancels runs where none is installed.
"""
