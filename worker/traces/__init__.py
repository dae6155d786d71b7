"""Traces of jobs. A trace lasts from a job's enqueueing to its written end, and its spans are made then."""
