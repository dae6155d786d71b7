"""One trace for each job, from its enqueueing to its written end, for a collector of OpenTelemetry's.

A job's spans are made at once, at its end, of times that the worker has by then. OpenTelemetry is imported
where TOKENMILL_TRACES asks for traces, and not otherwise.
"""
