"""Parquet runs as far as no file is read: arguments, plan, state in Redis, jobs. Nothing here imports pyarrow."""
