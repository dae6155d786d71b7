"""What a running job gets from the process that runs it."""

from jobs.context.job_context import MAX_RESULT_BYTES, JobContext, Lease, accept_any_sampling, never_interrupted

__all__ = ["MAX_RESULT_BYTES", "JobContext", "Lease", "accept_any_sampling", "never_interrupted"]
