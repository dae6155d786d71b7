"""Names a run's files and jobs, and tells a file's format from its name. Needs no pyarrow."""

import re
from collections.abc import Iterable
from typing import Any

from jobs.errors import MixedFormats, wrong_value_error

PARQUET = "parquet"
CSV = "csv"
TSV = "tsv"
JSONL = "jsonl"
ARROW = "arrow"
#: OpenAI's batch files. They are named like JSONL files, so a run must ask for this format by name.
OPENAI_BATCH = "openai-batch"

#: The endings of file names, by format. In folders, only such files are input.
SUFFIXES = {
    PARQUET: (".parquet",),
    CSV: (".csv",),
    TSV: (".tsv",),
    JSONL: (".jsonl", ".ndjson"),
    ARROW: (".arrow", ".feather", ".ipc", ".arrows"),
    OPENAI_BATCH: (".jsonl", ".ndjson"),
}

#: Formats whose files are lines of text, without types and without an index.
LINES = frozenset({CSV, TSV, JSONL, OPENAI_BATCH})

#: Formats whose first line names the columns.
HEADED = frozenset({CSV, TSV})
#: The formats that an output may have if it is one file.
OUTPUTS = (PARQUET, CSV, JSONL, ARROW)
#: Endings of compressed files of lines. They come after the format's ending.
COMPRESSED = (".gz", ".zst", ".bz2")


def parse_single_file(name: str, value: Any) -> str | None:
    """Return the format of the one file that `single_file` asks for; None if it asks for parts. Raises InvalidValue."""
    if value is False:
        return None
    if value is True:
        return PARQUET
    if not isinstance(value, str) or value not in OUTPUTS:
        raise wrong_value_error(name, value, f"true, false, or one of {', '.join(OUTPUTS)}")
    return value


def named_format(name: str) -> str | None:
    """Return the format that a file's name shows; None if the name shows no format."""
    name = name.lower()
    for suffix in COMPRESSED:
        if name.endswith(suffix):
            uncompressed = named_format(name.removesuffix(suffix))
            return uncompressed if uncompressed in LINES else None
    for file_format, suffixes in SUFFIXES.items():
        if name.endswith(suffixes):
            return file_format
    return None


def shows_format(name: str, wanted: str | None) -> bool:
    """Whether a file's name shows the wanted format, or any format if `wanted` is None."""
    file_format = named_format(name)
    if wanted is None:
        return file_format is not None
    if wanted == OPENAI_BATCH:  # batch files are named like JSONL files
        return file_format == JSONL
    return file_format == wanted


def one_format(names: Iterable[str], wanted: str | None = None) -> str:
    """Return the wanted format. If `wanted` is None, return the one format that the files' names show.

    A name that shows no format counts as Parquet, and so does an empty list. Raises MixedFormats for several formats.
    """
    if wanted is not None:
        return wanted
    examples: dict[str, str] = {}  # by format, the name of the first such file
    for name in names:
        file_format = named_format(name) or PARQUET
        examples.setdefault(file_format, name)
    if len(examples) > 1:
        first_format, other_format = list(examples)[:2]
        raise MixedFormats(
            examples[other_format], other_format, examples[first_format], first_format
        )
    return next(iter(examples), PARQUET)


# Names of files and folders in an output. Programs that read a folder of Parquet skip names with a leading _.
PLAN = "_plan.json"
MANIFEST = "_manifest.json"
REPORT = "_report.html"
#: Written last, when every row is there.
SUCCESS = "_SUCCESS"
TEMPORARY_PREFIX = "_tmp."
#: The folder of the parts, if the output is one file.
PARTS = "_parts"
#: The folder where open shards keep what they have computed, until the run ends.
JOURNAL = "_journal"
#: The folder of Parquet files that were made from other inputs.
INPUT = "_input"
#: The folder of the keys of the parts' rows. The names of its files begin with _, so that polars does not read them.
KEYS = "_keys"
#: The beginning of the name of a file of row numbers; see row_numbers_name.
ROWS_PREFIX = "_rows-"
#: The folder of answers that were taken from earlier runs.
REUSED = "_reused"

# A log of answers (jobs/parquet/reuse/answer_log.py) has these columns beside the columns of the answers.
#: The row's index in its shard.
ROW = "_row"
#: The row's whole key.
KEY = "_key"
#: A hash that identifies the model that answered the row, or that is asked.
MODEL = "_model"
#: The earlier run's row from which the answer was taken.
SOURCE = "_source"
#: The number of tokens generated for this row and for rows equal to it. Only the first of these rows has the number.
TOKENS = "_tokens"
#: The progress of a row without an answer, as JSON.
UNDER_WAY = "_under_way"
LOG_COLUMNS = (ROW, KEY, MODEL, SOURCE, TOKENS, UNDER_WAY)

_RUN_ID = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(r"([0-9a-f]{16})-(?:plan|(\d+)(?:-2)?)", re.ASCII)
_PART = re.compile(r"part-(?P<shard>\d{5,})\.parquet")


def is_run_id(value: object) -> bool:
    """Whether a value has the form of a run's id."""
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


def part_name(shard: int) -> str:
    """Return the file name of a shard's part."""
    return f"part-{shard:05d}.parquet"


def keys_name(shard: int) -> str:
    """Return the name of the file with the keys of a part's rows, as a path below the run's folder."""
    return f"{KEYS}/_part-{shard:05d}.bin"


def row_numbers_name(execution_id: str) -> str:
    """Return the name of the file that lists the rows that planning has chosen, as a path below the run's folder."""
    # Earlier versions numbered these files. The number was always 0, and stays in the name.
    return f"{KEYS}/{ROWS_PREFIX}00000.{execution_id}.bin"


def output_names(single_file: str | None) -> tuple[str, ...]:
    """Return the names of the files that hold the rows of all parts; none if the output is the parts themselves.

    single_file: the files' format, such as "csv"; see `parse_single_file`.
    """
    if single_file is None:
        return ()
    if single_file == OPENAI_BATCH:
        return ("output.jsonl", "errors.jsonl")
    return (f"output.{single_file}",)


def part_shards(names: Iterable[str]) -> dict[int, str]:
    """Return the names of parts among these file names, by shard."""
    parts = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match is None:
            continue
        shard = int(match["shard"])
        if part_name(shard) == name:  # the pattern also matches names with too many zeros
            parts[shard] = name
    return parts


def temporary_name(execution_id: str, name: str) -> str:
    """Return the name that a file has while an execution writes it. The glob `*.parquet` does not match this name."""
    return f"{TEMPORARY_PREFIX}{execution_id}.{name}.tmp"


def shard_job_id(run: str, shard: int, is_second: bool = False) -> str:
    """Return the id of a shard's job. is_second: the job asks a cascade's second model."""
    job_id = f"{run}-{shard:05d}"
    return f"{job_id}-2" if is_second else job_id


def plan_job_id(run: str) -> str:
    """Return the id of a run's planning job."""
    return f"{run}-plan"


def run_and_shard(job_id: str) -> tuple[str, int | None] | None:
    """Return the run and the shard that a job's id names; None if the job belongs to no run.

    The shard is None for a planning job.
    """
    match = _JOB.fullmatch(job_id)
    if match is None:
        return None
    run, shard_text = match.groups()
    shard = None if shard_text is None else int(shard_text)
    return run, shard


def job_shard(run: str, job_id: str) -> int | None:
    """Return the shard to which a job belongs; None if the job computes no shard of this run."""
    run_shard = run_and_shard(job_id)
    if run_shard is None:
        return None
    run_of_job, shard = run_shard
    return shard if run_of_job == run else None
