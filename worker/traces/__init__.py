"""Traces of jobs. A trace lasts from a job's enqueueing until the job's end is written. Then the spans are made."""
