"""A run without its files: its arguments, plan, jobs and state in Redis. Nothing here imports pyarrow."""
