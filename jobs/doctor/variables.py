"""What the environment says to RQ: `RQ_` variables that our workers and producers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .findings import Finding, fault, ok, warning

#: What a worker of ours needs where they are set.
EXPECTED = {
    "RQ_JOB_CLASS": "rq.job.Job",
    "RQ_QUEUE_CLASS": "rq.Queue",
}

WORKER_CLASS = "worker.BatchWorker"


def check_variables(
    environ: Mapping[str, str], from_file: Mapping[str, str | None], role: str
) -> Iterator[Finding]:
    """from_file: what `.env` holds, which RQ does not read."""
    found = list(_odd(environ, from_file, role))
    yield from found
    if not found:
        yield ok("settings", "no RQ_ variable stands in the way")


def _odd(environ: Mapping[str, str], from_file: Mapping[str, str | None], role: str) -> Iterator[Finding]:
    for name, expected in EXPECTED.items():
        given = environ.get(name, expected)
        if given != expected and not (name == "RQ_QUEUE_CLASS" and given.endswith(".Queue")):
            mend = f"unset {name}, for workers and producers alike"
            yield fault("settings", f"{name}={given!r}, expected {expected!r}", mend)
    if role == "worker" and environ.get("RQ_WORKER_CLASS", WORKER_CLASS) != WORKER_CLASS:
        given = environ["RQ_WORKER_CLASS"]
        mend = f"start workers with --worker-class {WORKER_CLASS}, or set the variable to it"
        yield warning("settings", f"RQ_WORKER_CLASS={given!r} loads the model again for each job", mend)
    if "RQ_REDIS_URL" in from_file and "RQ_REDIS_URL" not in environ:
        mend = "export it, or start by honcho or systemd (EnvironmentFile=), which read such a file"
        yield warning("settings", ".env has RQ_REDIS_URL, which RQ and tokenmill do not read there", mend)
