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
    """Base of everything the worker raises. fault: who has to act where it fails a job."""

    fault: ClassVar[Fault] = "server"


class StartupError(WorkerError):
    """The worker cannot start; the message names the value to change."""


class SettingsError(StartupError):
    """A setting has a value that cannot be used; the message names its variable."""


class MetricsNotServed(StartupError):
    """The address for metrics cannot be listened on: (host, first and last port, what the last one said)."""

    def __init__(self, host: str, first: int, last: int, reason: str) -> None:
        ports = str(first) if first == last else f"{first}-{last}"
        super().__init__(
            f"metrics cannot be served on {host}, port {ports} ({reason}): set "
            "TOKENMILL_METRICS_PORT to a free one, or to as many as there are workers here, such as "
            "9464-9471, and TOKENMILL_METRICS_HOST to an address of this machine"
        )


class FunctionNotFound(StartupError):
    """A function that the operator allows cannot be imported: (its name, what the import raised)."""

    def __init__(self, name: str, reason: Exception) -> None:
        super().__init__(
            f"TOKENMILL_ALLOWED_FUNCTIONS names {name!r}, which cannot be used "
            f"({type(reason).__name__}: {reason}): correct the name, or say where the module "
            "is, with `--path .` for the working directory"
        )


class ForeignJobsPackage(StartupError):
    """`import jobs` found another project's package."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"'import jobs' found {found}, which is not Tokenmill's: start the worker from a folder "
            "without a module named 'jobs', or in an environment of its own"
        )


class EngineFailed(WorkerError):
    """The engine raised while it was stepping; every job it held was given back to its queue."""


class TooManyStuckThreads(WorkerError):
    """More functions than bearable went on after their timeouts, in code that nothing can interrupt."""

    def __init__(self, num_stuck: int, most: int) -> None:
        super().__init__(
            f"{num_stuck} threads hang in functions or callbacks that nothing could interrupt, more "
            f"than TOKENMILL_MAX_STUCK_THREADS={most}: what it holds is given back, and only its "
            "end frees them; the log says where each hangs"
        )


class FaultySurroundings(WorkerError):
    """Jobs in a row met faults of the worker's own surroundings: (how many, the last one). All were given
    back."""

    def __init__(self, in_a_row: int, last: str) -> None:
        super().__init__(
            f"{in_a_row} faults in a row of this worker, not of its jobs (the last: {last}): it "
            "gives back what it holds and leaves; mend its installation, memory, disk or limits, and restart"
        )


class IoThreadFailed(WorkerError):
    """The thread that talks to Redis raised; other workers take over when its leases run out."""


class FileTimeout(WorkerError):
    """A job is failed because its files kept it waiting: (what went on, seconds).

    It is not given back: it may cost the next worker as much, and so on for ever.
    """

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(
            f"{what} for more than {limit_s:g} s (TOKENMILL_FILE_TIMEOUT_S): look at the disk or "
            "mount; where it is only slow, raise the limit, or give fewer rows_per_shard and files of "
            "smaller row groups; then submit the run again"
        )


def file_timeout(what: str, limit_s: float) -> type[FileTimeout]:
    """Return a class of this error that needs no arguments: only classes can be raised in another thread."""

    def __init__(self: FileTimeout) -> None:
        FileTimeout.__init__(self, what, limit_s)

    return type("FileTimeout", (FileTimeout,), {"__init__": __init__, "__module__": FileTimeout.__module__})


class JobSetAside(WorkerError):
    """The job is failed because workers died while they ran it: more tries would cost more of them."""


class EndNotTaken(WorkerError):
    """The job's end could not be written, by a server that takes others: (its bytes, what was raised)."""

    fault = "client"

    def __init__(self, num_bytes: int, reason: str) -> None:
        super().__init__(
            f"the job has ended, but Redis does not take the {num_bytes} bytes of its end "
            f"({reason}): return less, write it to a file, or raise the server's proto-max-bulk-len"
        )


class JobRefused(WorkerError):
    """The job is failed without running any of it, and is not retried."""

    fault = "client"


class BadPayload(JobRefused):
    """The payload is not JSON, or not a call of a plain function."""


class TooLarge(JobRefused):
    """The payload, unpacked, or the id is beyond its bound."""


class NotAllowed(JobRefused):
    """The job names a function that is not on the allow list."""

    def __init__(self, role: str, name: str, nearest: str | None = None) -> None:
        """nearest: the name on the list that may have been meant."""
        meant = "" if nearest is None else f"; did you mean {nearest!r}?"
        super().__init__(
            f"{role} {name!r} is not on this worker's allow list, so it was neither imported nor "
            f"run: add its exact name to TOKENMILL_ALLOWED_FUNCTIONS if it is meant to run here{meant}"
        )
