"""The work on one shard: its rows are read, asked and written."""
