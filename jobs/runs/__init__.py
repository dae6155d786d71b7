"""What a run has besides its tables: its arguments, plan, jobs and state in Redis. Nothing here imports pyarrow."""
