"""Traces of jobs, each from the job's enqueueing until its end is written. Only then are its spans made."""
