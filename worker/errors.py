"""Errors of the worker.

WorkerError
├── StartupError           the worker cannot start: a setting, the serializer, Redis or the model
│   ├── SettingsError      a TOKENMILL_ variable holds a bad value
│   ├── MetricsNotServed   no port to serve metrics on
│   ├── FunctionNotFound   a function on the allow list cannot be imported
│   └── ForeignJobsPackage the importable `jobs` is not Tokenmill's
├── EngineFailed           the engine raised in the middle of a step; its jobs were given back
├── TooManyStuckThreads functions hang beyond their timeouts; what the worker held was given back
├── FaultySurroundings     a missing module, a lack of memory or the like, met by jobs in a row
├── IoThreadFailed         the thread that talks to Redis raised; leases run out and others take over
├── FileTimeout            a job's files kept it waiting for too long
├── JobSetAside            a job that took too many workers with it
├── EndNotTaken            a job's end that Redis refuses time and again, as too large for it
└── JobRefused             a job that must not run here: payload, function or callback
    ├── BadPayload         the payload is no JSON list of (function, instance, args, kwargs)
    ├── TooLarge           the payload or the id is beyond its bound
    └── NotAllowed         a function or callback outside the allow list
"""

from typing import ClassVar

from jobs.errors import Fault


class WorkerError(Exception):
    """Base of the worker's errors; `message` takes the arguments. fault: who has to act."""

    message: ClassVar[str] = "{0}"
    fault: ClassVar[Fault] = "server"

    def __str__(self) -> str:
        return self.message.format(*self.args) if self.args else self.message


class StartupError(WorkerError):
    """The worker cannot start; the message names the value to change."""


class SettingsError(StartupError):
    """A setting has a value that cannot be used; the message names its variable."""


class MetricsNotServed(StartupError):
    """Metrics cannot be served on this address: (host, port or ports, the last error)."""

    message = (
        "metrics cannot be served on {0}, port {1} ({2}): set TOKENMILL_METRICS_PORT to a free one, or to as many "
        "as there are workers here, such as 9464-9471, and TOKENMILL_METRICS_HOST to an address of this machine"
    )


class FunctionNotFound(StartupError):
    """An allowed function cannot be imported: (its name, the error)."""

    message = (
        "TOKENMILL_ALLOWED_FUNCTIONS names {0!r}, which cannot be used ({1.__class__.__name__}: {1}): correct the "
        "name, or say where the module is, with `--path .` for the working directory"
    )


class ForeignJobsPackage(StartupError):
    """`import jobs` found another project's package: (where)."""

    message = (
        "'import jobs' found {0}, which is not Tokenmill's: start the worker from a folder without a module named "
        "'jobs', or in an environment of its own"
    )


class EngineFailed(WorkerError):
    """The engine raised while it was stepping; every job it held was given back to its queue."""


class TooManyStuckThreads(WorkerError):
    """Functions went on after their timeouts, in code that cannot be interrupted: (how many, the most)."""

    message = (
        "{0} threads hang in functions or callbacks that nothing could interrupt, more than "
        "TOKENMILL_MAX_STUCK_THREADS={1}: what it holds is given back, and only its end frees them; the log says "
        "where each hangs"
    )


class FaultySurroundings(WorkerError):
    """Jobs in a row met faults of the worker's own surroundings, and were given back: (how many, the last)."""

    message = (
        "{0} faults in a row of this worker, not of its jobs (the last: {1}): it gives back what it holds and leaves; "
        "mend its installation, memory, disk or limits, and restart"
    )


class IoThreadFailed(WorkerError):
    """The thread that talks to Redis raised; other workers take over when its leases run out."""


class FileTimeout(WorkerError):
    """A job is failed because its files kept it waiting: (what went on, seconds).

    It is not given back: it may cost the next worker as much.
    """

    message = (
        "{0} for more than {1:g} s (TOKENMILL_FILE_TIMEOUT_S): look at the disk or mount; where it is only slow, raise "
        "the limit, or give fewer rows_per_shard and files of smaller row groups; then submit the run again"
    )


def file_timeout(what: str, limit_s: float) -> type[FileTimeout]:
    """Return a subclass without arguments: only classes can be raised in another thread."""
    names = {"message": FileTimeout.message.format(what, limit_s), "__module__": FileTimeout.__module__}
    return type("FileTimeout", (FileTimeout,), names)


class JobSetAside(WorkerError):
    """The job is failed because workers died while they ran it: more tries would cost more of them."""


class EndNotTaken(WorkerError):
    """The job's end could not be written, by a server that takes others: (its bytes, the error)."""

    fault = "client"
    message = (
        "the job has ended, but Redis does not take the {0} bytes of its end ({1}): return less, write it to a file, "
        "or raise the server's proto-max-bulk-len"
    )


class JobRefused(WorkerError):
    """The job is failed without running any of it, and is not retried."""

    fault = "client"


class BadPayload(JobRefused):
    """The payload is not JSON, or not a call of a plain function."""


class TooLarge(JobRefused):
    """The payload, unpacked, or the id is beyond its bound."""


class NotAllowed(JobRefused):
    """The job names a function that is not on the allow list: (its role, its name, "" or a likely one)."""

    message = (
        "{0} {1!r} is not on this worker's allow list, so it was neither imported nor run: add its exact name to "
        "TOKENMILL_ALLOWED_FUNCTIONS if it is meant to run here{2}"
    )
