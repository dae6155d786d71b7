"""Calls that are answered over the open connection: their jobs, and the streams of their answers."""
