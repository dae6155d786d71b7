"""Every error with which a job of ours can fail.

Each message says what was found, what was expected and what to do. The values in a message are the error's positional
`args`, so that an error pickles and its text can be made again in another process.
"""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from jobs.common.display import HIDDEN, brief

#: Who must act: the "client"; the "server", and another try may succeed; nobody, because the job was "cancelled".
Fault = Literal["client", "server", "cancelled"]
#: The beginning of the last line of a failed job's `exc_info`, if Tokenmill failed the job.
FAULT_PREFIX = "tokenmill: "


def fault_line(fault: Fault) -> str:
    """Return the last line of a failed job's `exc_info`, which says whose fault the failure is."""
    return f"{FAULT_PREFIX}{fault}"


def fault_of(error: str) -> str:
    """Return the `Fault` in the last line of a failed job's error; "" if that line has none."""
    _, _, last_line = error.rstrip().rpartition("\n")
    if not last_line.startswith(FAULT_PREFIX):
        return ""
    return last_line.removeprefix(FAULT_PREFIX)


class ToldError(Exception):
    """Base of errors whose docstring is the message. A name in braces in the docstring stands for an argument.

    The arguments are positional, in the order in which their names first stand in the docstring.
    """

    message: ClassVar[str] = "{0}"
    argument_names: ClassVar[tuple[str, ...]] = ()
    fault: ClassVar[Fault] = "client"

    def __init_subclass__(cls, fault: Fault | None = None) -> None:
        """Make the class's message from its docstring: each name in braces becomes the number of its argument."""
        cls.fault = fault or cls.fault
        text = " ".join((cls.__doc__ or "").split())
        names = list(dict.fromkeys(re.findall(r"{(\w+)", text)))  # each name once, in its order

        def numbered(match: re.Match[str]) -> str:
            """Return an opening brace and the name's number. What follows the name, such as `!r}`, is not matched."""
            name = match[1]
            return "{" + str(names.index(name))

        if names:
            cls.message = re.sub(r"{(\w+)", numbered, text)
            cls.argument_names = tuple(names)

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the argument with this name in the message; `default` if the message has no such name."""
        if name not in self.argument_names:
            return default
        index = self.argument_names.index(name)
        return self.args[index]

    def __str__(self) -> str:
        try:
            return self.message.format(*self.args) if self.args else self.message
        except (LookupError, ValueError, TypeError):  # the message names other arguments
            return f"{self.message} {self.args!r}"


class JobsError(ToldError):
    """Base of every error of this package. A note of the error says whose fault it is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.add_note(fault_line(self.fault))

    @property
    def log_text(self) -> str:
        """Return the message for logs, without anything that may be a part of a prompt."""
        return str(self)


class InvalidJob(JobsError):
    """Raised when the arguments of a job are wrong. Its one argument is the message."""


class NotBuilt(InvalidJob):
    """Raised when a job asks for something that Tokenmill does not do. Its one argument is the message."""


class InvalidValue(InvalidJob):
    """Raised when an argument of a job has an impossible value.

    The error's arguments are the message, then a value for each {} in the message. Logs hide these values.
    """

    def __str__(self) -> str:
        text, *values = self.args
        return _filled(str(text), values)

    @property
    def log_text(self) -> str:
        """Return the message without the values."""
        text, *values = self.args
        return _filled(str(text), [HIDDEN] * len(values))


def _filled(text: str, values: Sequence[object]) -> str:
    """Return a text with a value in place of each {}. If there are more {} than values, the first {} stay.

    All other braces, such as those of JSON, stay as they are.
    """
    if not values:
        return text
    pieces = text.rsplit("{}", len(values))
    filled = pieces[0]
    for value, piece in zip(values, pieces[1:], strict=False):
        filled += f"{value}{piece}"
    return filled


def wrong_value_error(name: str, value: object, expected: str) -> InvalidValue:
    """Return the error for an argument whose value is not the expected one."""
    # InvalidValue puts the value in place of {}.
    return InvalidValue(f"{name} is {{}}, expected {expected}", brief(value))


def check_limit(number: int, limit: int, sentence: str, remedy: str = "") -> None:
    """Raise InvalidJob if a number is above its limit.

    sentence: the beginning of the error's text, with {} in place of the number. remedy: what to do.
    """
    if number > limit:
        text = f"{sentence.format(number)}, more than the limit of {limit}"
        if remedy:
            text += f": {remedy}"
        raise InvalidJob(text)


class ModelNotServed(InvalidJob):
    """the job asks for model {model!r}, and this worker serves {served}: name one of these, leave `model` out, or use a
    queue whose workers serve {model!r}"""


class UnknownAdapter(InvalidJob):
    """there is no adapter {name!r} on this worker; known are {known}: name one of these, or put the adapter's folder
    into the worker's TOKENMILL_ADAPTERS"""


class AdapterAwaited(JobsError, fault="server"):
    """Raised when the files that a job's adapter is pinned to are not here now. Its one argument is the message."""


class AnswerMissing(JobsError):
    """job {job}, on which this job depends, has no answer: {found}"""


class RequestFailed(JobsError):
    """request {index} of this job failed: {reason}"""

    @property
    def log_text(self) -> str:
        """Return the message with the reason up to its first colon.

        After the colon, there may be the text of an error that a chat template raised, with parts of a prompt.
        """
        index, reason = self.args
        beginning, _, _ = str(reason).partition(": ")
        return self.message.format(index, beginning)


class DeadlinePassed(JobsError):
    """the deadline {deadline} passed before this job was begun: enqueue it again with a later one"""


class ResultTooLarge(JobsError):
    """the job's result has more than the limit of {limit} bytes: ask for less in one job, score a Parquet file, or
    raise the worker's setting TOKENMILL_MAX_RESULT_BYTES"""


class RunError(JobsError):
    """Base of the errors of a Parquet run."""


class InputError(RunError):
    """Base of the errors about a run's input."""


class PathOutsideRoots(InputError):
    """{path} lies outside the data roots {roots}: move the file below a root, or add its folder to the worker's setting
    TOKENMILL_DATA_ROOTS"""


class UnsupportedScheme(InputError):
    """{path} names the storage {scheme!r}: name a local path, or file://, s3://, gs:// or az://"""


class InputNotFound(InputError):
    """no input file at {path}: name a regular file, a folder that holds *.parquet or files of one other format, a glob,
    or a list"""


class SearchTooLong(InputError):
    """the search for the input has met more than {limit} names, the last in {folder}: name the folders that hold the
    files, and keep other files out of them"""


class NestedFolders(InputError):
    """{folder} holds files deeper down, such as {file}: name '{folder}/**/*{suffix}' to read all of them, or
    '{folder}/*{suffix}' to read only the files that lie directly in the folder"""


class CorruptParquet(InputError):
    """{path} is not readable as Parquet ({reason}): write it again, leave it out, or name its format with
    input_format (--input-format)"""


class CorruptTable(InputError):
    """{path} is not readable as {format} ({reason}): write it again, leave it out, or name its input_format"""


class OtherEncoding(CorruptTable):
    """{path} is not UTF-8, and looks like {encoding}: set encoding (--encoding {encoding}), or write the file again as
    UTF-8"""


class MarkedAsUTF8(CorruptTable):
    """{path} begins with UTF-8's byte order mark, and the run's encoding is {encoding}: leave encoding out, or write
    the file again as {encoding}"""


class OtherDelimiter(CorruptTable):
    """{path} has only one column, {name}, and looks separated by {delimiter}: set delimiter (--delimiter
    {delimiter}){encoding}, or write the file again with the delimiter {expected}"""


class TooManyBadLines(CorruptTable):
    """{path}: {bad} of its {lines} rows cannot be read, more than a tenth. The first is line {line}, which {problem}.
    Mend the file, or set its input_format, encoding or delimiter"""


class MixedFormats(InputError):
    """{path} is {format} by its name, and {other} is {other_format}: name files of one format, or set the
    input_format of all (--input-format)"""


class TableNotRead(InputError):
    """{path}: reading it {reason}: write it again with shorter values, smaller pages or fewer columns, or raise the
    worker's setting TOKENMILL_MAX_SHARD_BYTES"""


class SchemaMismatch(InputError):
    """{path}: {difference}: every file of a run needs the same columns, each with a different name"""


class MissingColumn(InputError):
    """no column {column!r} in {path}: the file holds {found}; name one of its columns"""


class WrongColumnType(InputError):
    """column {column!r} is of type {type}, expected {expected}: convert the column, or name another"""


class ColumnConflict(InputError):
    """the input already has a column {column!r}, which the output adds: {remedy}"""


class ShardTooLarge(InputError):
    """{path}: {problem}, more than {limit} bytes ({setting}): {remedy}, or raise that setting"""


class InputChanged(InputError):
    """{path} changed since this run was planned ({change}): restore the file, or submit into another folder with
    --reuse and this run's folder, so that only new rows are computed; finished parts stay"""


class ConvertedInputGone(InputError):
    """{path}, which was made from {input} for this run, is gone: submit the run again, and the file is made again"""


class NewRowsGone(InputError):
    """{path}, which held this run's rows of {input}, is gone: submit into another output with --reuse {output}"""


class OutputError(RunError):
    """Base of the errors about a run's output folder."""


class OutputHoldsAnotherRun(OutputError):
    """{output} holds another run ({difference}): submit with the same arguments to resume that run, or choose another
    output; with --reuse {output}, answers to the same requests are taken over"""


class OutputHoldsForeignFiles(OutputError):
    """{output} is not empty and holds no run (found {name!r}): choose an empty or a new folder"""


class OutputNotWritable(OutputError, fault="server"):
    """cannot write {path} ({reason}): make the folder writable for the worker, then submit again; finished parts
    stay"""


class DiskFull(OutputError, fault="server"):
    """no space left while writing {path} ({reason}): free some, then submit again; finished parts stay"""


class PlanDamaged(OutputError):
    """{path} is not this run's plan ({reason}): restore it, or submit with another output"""


class PlanOfAnotherVersion(OutputError):
    """{path} was planned by {age} version of Tokenmill (format {found}, and this one reads {expected}): run it with
    workers of that version, or submit with another output"""


class PartDamaged(OutputError):
    """{path} is not what the run has written ({reason}): restore it, or submit into another folder with --reuse
    {output}, so that only what is lacking is computed; if {output} has no _SUCCESS, you may also remove the file and
    submit again"""

    def __str__(self) -> str:
        path, reason = self.args
        # A part lies in the output folder, or in its folder _parts.
        folder, _, _ = path.rpartition("/")
        return self.message.format(path, reason, folder.removesuffix("/_parts"))


class CannotReuse(OutputError):
    """cannot reuse {output} ({found}): name the output folder of another run, or submit without it"""


class PathSwapped(RunError, fault="server"):
    """{path} is not where it was ({reason}): put the folder or file itself back, not a link to it, then submit again;
    finished parts stay"""


class RunOfAnotherModel(RunError):
    """run {run} is of model {model}, not of {other}: start a worker that serves the run's model, or submit it with
    another output"""


class PlanningUnderWay(RunError):
    """run {run} is being planned already, {how}: wait for that, or `tokenmill cancel {run}`, then submit again"""


class NoSecondModel(RunError, fault="server"):
    """workers on queue {queue!r} serve {found} as a second model, expected exactly one beside the first model
    {first}: start a worker with a second model there, or name one of several with escalate_model, then submit again"""


class AnswersDamaged(RunError):
    """{path}, which keeps answers until a part holds them, cannot be read ({reason}): remove it, and the answers are
    computed again"""


class KeptAnswersLost(RunError):
    """{path}, the first model's answers for a shard, cannot be read ({reason}): remove it if it is there, and submit
    the run again"""


class RunCancelled(RunError, fault="cancelled"):
    """run {run} was cancelled: `tokenmill submit` with the same arguments resumes it; requeuing its jobs does not"""


class RunResubmitted(RunError):
    """run {run} was submitted again while being cancelled, and goes on: cancel it again to stop it"""


class UnknownRun(RunError):
    """this Redis knows no run {run!r}, and no run's output folder has that name: name the folder, or resume the run by
    submitting it again"""


class RunBusy(RunError, fault="server"):
    """another process is planning or cancelling run {run}: wait for it, then submit again"""


class TrialFailed(RunError):
    """Raised when a command waits for a job's result, and no worker takes the job, or the job fails.

    The error's one argument is the reason.
    """


class RunFailed(RunError):
    """run {run}: {how}"""


class InputBeingWritten(InputChanged):
    """{path} is being written to: submit once it is whole, or submit a copy"""


class WebhookFailed(RunError, fault="server"):
    """the webhook of a run's end failed: {found}"""


class WebhookRefused(RunError):
    """the webhook of a run's end was refused: {found}"""


class RunNotHere(RunError):
    """run {run} cannot be read from {folder}: {problem}: wait for the run's folder, or give the folder's path
    on this machine"""
