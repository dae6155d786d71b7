"""The worker's named errors. Docstrings with braces are the errors' messages."""

from typing import ClassVar

from jobs.errors import Fault, ToldError


class WorkerError(ToldError):
    """Base of the worker's errors."""

    fault: ClassVar[Fault] = "server"


class StartupError(WorkerError):
    """The worker cannot start; the message names the value to change."""


class SettingsError(StartupError):
    """A setting has a value that cannot be used; the message names its variable."""


class MetricsNotServed(StartupError):
    """metrics cannot be served on {host}, port {port} ({error}): set TOKENMILL_METRICS_HOST to an address of this
    machine, and TOKENMILL_METRICS_PORT to a free port, or to a range with a port for each worker here, such as
    9464-9471"""


class NameTaken(WorkerError):
    """the name {name} now belongs to another worker ({successor}), which was started while this one was frozen or
    cut off: this one stops; end a frozen worker before you start another with its name"""


class FunctionNotFound(StartupError):
    """TOKENMILL_ALLOWED_FUNCTIONS names {name!r}, which cannot be used ({error.__class__.__name__}: {error}): correct
    the name, or say where the module is, with `--path .` for the working directory"""


class ForeignJobsPackage(StartupError):
    """'import jobs' found {place}, which is not Tokenmill's: start the worker from a folder without a module named
    'jobs', or in an environment of its own"""


class EngineFailed(WorkerError):
    """The engine raised while it was stepping; every job it held was given back to its queue."""


class TooManyStuckThreads(WorkerError):
    """{number} threads hang in functions or callbacks that nothing could interrupt, more than
    TOKENMILL_MAX_STUCK_THREADS={most}: the worker gives back its jobs and exits, because nothing else ends
    the threads; the log says where each hangs"""


class FaultySurroundings(WorkerError):
    """{number} consecutive faults of this worker itself, not of its jobs (the last: {last}): the worker gives back its
    jobs and exits; mend its installation, memory, disk or limits, and restart"""


class IoThreadFailed(WorkerError):
    """The thread that talks to Redis raised; other workers take over when its leases run out."""


class FileTimeout(WorkerError):
    """{what} for more than {limit_s:g} s (TOKENMILL_FILE_TIMEOUT_S): look at the disk or mount; if it is only slow,
    raise the limit, or give fewer rows_per_shard and files of smaller row groups; then submit the run again"""


class JobSetAside(WorkerError):
    """{deaths} workers died while they ran this job{last} (TOKENMILL_MAX_WORKER_DEATHS={deaths}): it is set aside; look
    at the workers' logs before you enqueue it again"""


class EndNotTaken(WorkerError):
    """the job has run, but Redis does not take the {bytes} bytes of its result ({error}): return a smaller value,
    write it to a file, or raise the server's proto-max-bulk-len"""

    fault = "client"


class JobRefused(WorkerError):
    """The job fails before any of it runs, and is not retried."""

    fault = "client"


class BadPayload(JobRefused):
    """The payload is not JSON, or not a call of a plain function."""


class TooLarge(JobRefused):
    """The unpacked payload or the job's id is larger than its limit."""


class NotAllowed(JobRefused):
    """{role} {name!r} is not on this worker's allow list, so it was neither imported nor run: add its exact name to
    TOKENMILL_ALLOWED_FUNCTIONS if it is meant to run here{hint}"""
