"""Everything that a job of ours can fail with.

Every message says what was found, what was expected and what to do. All values are positional `args`,
so that an error pickles and its text can be rebuilt in another process.
"""

from typing import Any, ClassVar, Literal

from jobs.common.display import HIDDEN, brief

#: Who has to act: the "client", whose job fails whenever it is tried; the "server", where another try may go
#: better; nobody, as it was "cancelled" on a person's word.
Fault = Literal["client", "server", "cancelled"]

#: What the last line of a failed job's `exc_info` begins with, if Tokenmill failed it.
FAULT_PREFIX = "tokenmill: "


def fault_line(fault: Fault) -> str:
    """Return the last line of a failed job's `exc_info`."""
    return f"{FAULT_PREFIX}{fault}"


class JobsError(Exception):
    """Base of every error of this package: `message` is formatted with the positional arguments, and a note tells the
    fault."""

    message: ClassVar[str] = "{0}"
    fault: ClassVar[Fault] = "client"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.add_note(fault_line(self.fault))

    def __str__(self) -> str:
        return self.message.format(*self.args)

    @property
    def log_text(self) -> str:
        """Return the message without anything that may be a part of a prompt."""
        return str(self)


class NotInstalled(JobsError):
    """Raised when the package was copied and not installed, so that an entry point is missing: (name)."""

    fault = "server"
    message = "no entry point {0!r} of the group 'tokenmill' is installed: install Tokenmill with pip"


class InvalidJob(JobsError):
    """Raised when the arguments of a job are wrong: (text)."""


class InvalidValue(InvalidJob):
    """Raised when an argument has a value that cannot be: (text, what stands for each {} in it, hidden in logs)."""

    def __str__(self) -> str:
        text, *values = self.args
        return str(text).format(*values)

    @property
    def log_text(self) -> str:
        text, *values = self.args
        return str(text).format(*[HIDDEN] * len(values))


def unlike(name: str, value: object, expected: str) -> InvalidValue:
    """Return the error that an argument has another value than expected."""
    name, expected = (text.replace("{", "{{").replace("}", "}}") for text in (name, expected))
    return InvalidValue(f"{name} is {{}}, expected {expected}", brief(value))


class ModelNotServed(InvalidJob):
    """Raised when a job asks for a model that its worker does not serve: (model, the served one's name)."""

    message = (
        "the job asks for model {0!r}, and this worker serves {1!r}: name that one, leave `model` out, or "
        "use a queue whose workers serve {0!r}"
    )


class AnswerMissing(JobsError):
    """Raised when a job has left no answer for one that depends on it: (its id, what was found)."""

    message = "no answer of job {0}, on which this one depends: {1}"


class RequestFailed(JobsError):
    """Raised when the engine refused the prompts of a job: (index of the first, the engine's reason)."""

    message = "request {0} of this job failed: {1}"

    @property
    def log_text(self) -> str:
        """Without what follows a colon in the reason: a chat template's own words, for example."""
        index, reason = self.args
        return self.message.format(index, str(reason).partition(": ")[0])


class ResultTooLarge(JobsError):
    """Raised when a job's value is larger than a worker writes to Redis: (the limit in bytes)."""

    message = (
        "the job's result has more than the limit of {0} bytes: ask for less in one job, score a Parquet "
        "file, or raise the worker's setting TOKENMILL_MAX_RESULT_BYTES"
    )


class RunError(JobsError):
    """Base of the errors of a Parquet run."""


class InputError(RunError):
    """Base of what can be wrong with a run's input."""


class PathOutsideRoots(InputError):
    """Raised when a path leads outside the data roots: (path, roots joined by ':')."""

    message = (
        "{0} lies outside the data roots {1}: move the file below a root, "
        "or add its folder to the worker's setting TOKENMILL_DATA_ROOTS"
    )


class UnsupportedScheme(InputError):
    """Raised when a path names a storage that is not built: (path, scheme)."""

    message = "{0} names the storage {1!r}: name a local path, or file://, s3://, gs:// or az://"


class InputNotFound(InputError):
    """Raised when an input names nothing: (input)."""

    message = (
        "no input file at {0}: name a regular file, a folder that holds *.parquet or files of one other "
        "format, a glob, or a list"
    )


class SearchTooLong(InputError):
    """Raised when the search for a run's input meets too many names: (folder of the last, limit)."""

    message = (
        "the search for the input has met more than {1} names, the last in {0}: name the folders that hold "
        "the files, and keep other files out of them"
    )


class NestedFolders(InputError):
    """Raised when a folder's files lie in folders of plain names: (folder, one of the files, its suffix)."""

    message = (
        "{0} holds files deeper down, such as {1}: name '{0}/**/*{2}' to read all of them, or '{0}/*{2}' for "
        "those of its first level only"
    )


class CorruptParquet(InputError):
    """Raised when a file is not readable Parquet: (path, reason)."""

    message = (
        "{0} is not readable as Parquet ({1}): write it again, leave it out, or say with input_format "
        "(--input-format) what else it is"
    )


class CorruptTable(InputError):
    """Raised when a file is not readable in its format: (path, the format, reason)."""

    message = "{0} is not readable as {1} ({2}): write it again, leave it out, or name its input_format"


class MixedFormats(InputError):
    """Raised when a run's files have several formats: (path, its format, path of another, its format)."""

    message = (
        "{0} is {1} by its name, and {2} is {3}: name files of one format, or say with input_format "
        "(--input-format) what they are"
    )


class TableNotRead(InputError):
    """Raised when a file takes more to be read than it may: (path, what reading it did)."""

    message = (
        "{0}: reading it {1}: write it anew with shorter values, smaller pages or fewer columns, or raise "
        "the worker's setting TOKENMILL_MAX_SHARD_BYTES"
    )


class SchemaMismatch(InputError):
    """Raised when columns contradict each other: (path, what differs)."""

    message = "{0}: {1}: every file of a run needs the same, distinct columns"


class MissingColumn(InputError):
    """Raised when the input lacks a column: (column, path, columns found)."""

    message = "no column {0!r} in {1}: it holds {2}; name one of them"


class WrongColumnType(InputError):
    """Raised when a column cannot be rendered as a prompt: (column, its type, what is expected)."""

    message = "column {0!r} is of type {1}, expected {2}: convert the column, or name another"


class ColumnConflict(InputError):
    """Raised when the input holds a column that the output adds: (column, what to do)."""

    message = "the input already has a column {0!r}, which the output adds: {1}"


class ShardTooLarge(InputError):
    """Raised when a shard reads too much: (path, what takes how much, limit, its share, what to do)."""

    message = "{0}: {1}, more than {2} bytes ({3}TOKENMILL_MAX_SHARD_BYTES): {4}, or raise that setting"


class InputChanged(InputError):
    """Raised when an input file is not the one that was planned: (path, what changed)."""

    message = (
        "{0} changed since this run was planned ({1}): restore the file, or submit into another folder with --reuse "
        "and the path of this run's, which computes only what is new; finished parts stay"
    )


class ConvertedInputGone(InputError):
    """Raised when what planning has made of an input is gone: (path, the input's)."""

    message = "{0}, which planning has made of {1}, is gone: submit the run again, which makes it anew"


class NewRowsGone(InputError):
    """Raised when the rows that planning wrote for a run are gone: (path, the input's, the run's output)."""

    message = (
        "{0}, which holds the rows of {1} that this run has, is gone: submit into another output, and --reuse {2} too"
    )


class OutputError(RunError):
    """Base of what can be wrong with a run's output folder."""


class OutputHoldsAnotherRun(OutputError):
    """Raised when a folder holds a run with other arguments: (output, what differs)."""

    message = (
        "{0} holds another run ({1}): submit with the same arguments to resume it, or choose another output, "
        "with --reuse {0} to take over what was asked alike"
    )


class OutputHoldsForeignFiles(OutputError):
    """Raised when a new run's folder is not empty: (output, a name found there)."""

    message = "{0} is not empty and holds no run (found {1!r}): choose an empty or a new folder"


class OutputNotWritable(OutputError):
    """Raised when the output cannot be written: (path, reason)."""

    fault = "server"
    message = "cannot write {0} ({1}): make the folder writable for the worker, then submit again; finished parts stay"


class DiskFull(OutputError):
    """Raised when the output's disk or quota is full: (path, reason)."""

    fault = "server"
    message = "no space left while writing {0} ({1}): free some, then submit again; finished parts stay"


class PlanDamaged(OutputError):
    """Raised when a run's plan is not usable: (path, reason)."""

    message = "{0} is not this run's plan ({1}): restore it, or submit with another output"


class PartDamaged(OutputError):
    """Raised when a part, or the output file of all parts, is not what the run has written: (path, what was found)."""

    message = (
        "{0} is not what the run has written ({1}): restore it, or submit into another folder with --reuse {2}, which "
        "computes only what is lacking; as long as that folder has no _SUCCESS, you may also remove the file and "
        "submit again"
    )

    def __str__(self) -> str:
        path, found = self.args
        return self.message.format(path, found, path.rpartition("/")[0].removesuffix("/_parts"))


class CannotReuse(OutputError):
    """Raised when no answer can be taken from an earlier run: (its output, what was found)."""

    message = "cannot reuse {0} ({1}): name the output folder of another run, or submit without it"


class PathSwapped(RunError):
    """Raised when a path leads elsewhere than when it was looked up: (path, what was found)."""

    fault = "server"
    message = (
        "{0} is not where it was ({1}): put the folder or file itself back in its place, no link to it, then "
        "submit again; finished parts stay"
    )


class RunOfAnotherModel(RunError):
    """Raised when a run is another model's: (run, the run's model, what asks for it)."""

    message = (
        "run {0} is of model {1}, not of {2}: start a worker that serves the run's model, or submit it with "
        "another output"
    )


class PlanningUnderWay(RunError):
    """Raised when a run is being planned, but not as it is submitted now: (run, how)."""

    message = "run {0} is being planned already, {1}: wait for that, or `tokenmill cancel {0}`, then submit again"


class RunCancelled(RunError):
    """Raised when a job belongs to a cancelled run: (run)."""

    fault = "cancelled"
    message = "run {0} was cancelled: submit it again with the same arguments to resume it"


class RunResubmitted(RunError):
    """Raised when a run that is being cancelled or stopped was submitted again meanwhile: (run)."""

    message = "run {0} was submitted again while being cancelled, and goes on: cancel again if that is meant"


class UnknownRun(RunError):
    """Raised when Redis has no such run, and no folder holds it: (run, or path of a folder)."""

    message = (
        "this Redis knows no run {0!r}, and it is no run's output folder: name the folder, "
        "or submit again, which resumes a run"
    )


class RunBusy(RunError):
    """Raised when a run's lock cannot be had or was lost, or the job that plans it is another's: (run)."""

    fault = "server"
    message = "another process is planning or cancelling run {0}: wait for it, then submit again"


class TrialFailed(RunError):
    """Raised when no worker looks at a run's prompts, or the one that does fails: (reason)."""


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
