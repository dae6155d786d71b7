"""Parquet runs, without their tables: arguments, plan, state in Redis, jobs. Nothing here imports pyarrow."""
