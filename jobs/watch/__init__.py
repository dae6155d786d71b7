"""What is read of Redis to be shown: workers, queues and runs, now and over time. Needs no pyarrow."""
