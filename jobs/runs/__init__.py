"""The part of Parquet runs that reads no table: arguments, plan, state in Redis, jobs. Nothing here imports pyarrow."""
