"""Errors of commands that ask a run for what it does not have, or not yet."""

from jobs.errors import InputChanged, RunError


class RunFailed(RunError):
    """Raised when a run that was awaited did not finish as it should: (run, how it ended)."""

    message = "run {0}: {1}"


class InputBeingWritten(InputChanged):
    """Raised when an input file is another one after a look at it than before: (path)."""

    message = "{0} is being written to: submit once it is whole, or submit a copy"


class WebhookFailed(RunError):
    """Raised when a receiver did not take a run's end, but may take it later: (what came)."""

    fault = "server"
    message = "the webhook of a run's end failed: {0}"


class WebhookRefused(RunError):
    """Raised when a receiver refuses a run's end for good: (what came)."""

    message = "the webhook of a run's end was refused: {0}"


class RunNotHere(RunError):
    """Raised when a run's files are asked for and cannot be read here: (run, folder, what is missing)."""

    message = "run {0}: {2} in {1}: name its folder as this machine knows it, once it is there"
