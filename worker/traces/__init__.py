"""Traces of jobs. A trace reaches from the job's enqueueing until its end is written. After that its spans are made."""
