"""The names of a run's files and jobs, and the formats that files' names tell. Needs no pyarrow."""

import re
from collections.abc import Iterable
from typing import Any

from jobs.errors import MixedFormats, unlike

PARQUET, CSV, TSV, JSONL, ARROW = "parquet", "csv", "tsv", "jsonl", "arrow"
#: OpenAI's batch files: JSONL by their names, so they are asked for.
OPENAI_BATCH = "openai-batch"

#: How the names of a format's files end; in folders only such files are input.
SUFFIXES = {
    PARQUET: (".parquet",),
    CSV: (".csv",),
    TSV: (".tsv",),
    JSONL: (".jsonl", ".ndjson"),
    ARROW: (".arrow", ".feather", ".ipc", ".arrows"),
    OPENAI_BATCH: (".jsonl", ".ndjson"),
}

#: Formats whose files are lines of text: they have no types and no index of their own.
LINES = frozenset({CSV, TSV, JSONL, OPENAI_BATCH})

HEADED = frozenset({CSV, TSV})
OUTPUTS = (PARQUET, CSV, JSONL, ARROW)
#: What may follow the suffix of such a file, which is compressed then.
COMPRESSED = (".gz", ".zst", ".bz2")


def parse_single_file(name: str, value: Any) -> str | None:
    if value is False:
        return None
    if value is True:
        return PARQUET
    if not isinstance(value, str) or value not in OUTPUTS:
        raise unlike(name, value, f"true, false, or one of {', '.join(OUTPUTS)}")
    return value


def named_format(name: str) -> str | None:
    name = name.lower()
    for suffix in COMPRESSED:
        if name.endswith(suffix):
            found = named_format(name.removesuffix(suffix))
            return found if found in LINES else None
    return next((each for each, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def is_named(name: str, wanted: str | None) -> bool:
    found = named_format(name)
    wanted = JSONL if wanted == OPENAI_BATCH else wanted
    return found is not None if wanted is None else found == wanted


def one_format(names: Iterable[str], wanted: str | None) -> str:
    """Return the format wanted of a run's files, or that their names tell, else Parquet. Raises MixedFormats."""
    if wanted is not None:
        return wanted
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(named_format(name) or PARQUET, name)
    if len(found) > 1:
        (first, of_first), (other, of_other), *_ = found.items()
        raise MixedFormats(of_other, other, of_first, first)
    return next(iter(found), PARQUET)


PLAN = "_plan.json"
MANIFEST = "_manifest.json"
#: As the manifest, by a name that readers of a folder of Parquet pass by.
REPORT = "_report.html"

SUCCESS = "_SUCCESS"
TEMPORARY_PREFIX = "_tmp."
#: Where the parts lie of a run whose output is one file: a name that readers of folders pass by.
PARTS = "_parts"
#: Where open shards keep what they have computed, until the run ends.
JOURNAL = "_journal"

INPUT = "_input"
#: Where the keys of the parts' rows lie. Its files begin with _ too: polars reads others in such a folder.
KEYS, ROWS_PREFIX = "_keys", "_rows-"

REUSED = "_reused"
#: Columns beside answers that are kept: the row in its shard, its model's mark, which old row it was, its key with that
#: mark, and in a journal the tokens generated for it and equal rows, with the first.
ROW, MODEL, SOURCE, KEY, TOKENS = KEPT_BESIDE = ("_row", "_model", "_source", "_key", "_tokens")
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(r"([0-9a-f]{16})-(?:plan|(\d+)(?:-2)?)", re.ASCII)
_PART = re.compile(r"part-(\d{5,})\.parquet")


def is_run_id(value: object) -> bool:
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


def part_name(shard: int) -> str:
    return f"part-{shard:05d}.parquet"


def keys_name(shard: int) -> str:
    return f"{KEYS}/_part-{shard:05d}.bin"


def kept_name(execution_id: str) -> str:
    """Return the name, below the run's folder, of the file that says which rows of an input a planning has chosen."""
    return f"{KEYS}/{ROWS_PREFIX}00000.{execution_id}.bin"


def output_names(single_file: str | None) -> tuple[str, ...]:
    """Return the names of what is written of all parts, in a format; none for a run whose output is parts."""
    if single_file == OPENAI_BATCH:
        return ("output.jsonl", "errors.jsonl")
    return () if single_file is None else (f"output.{single_file}",)


def part_shards(names: Iterable[str]) -> dict[int, str]:
    """Return the shards whose parts are among some names, with these."""
    found = [(int(match[1]), name) for name in names if (match := _PART.fullmatch(name))]
    return {shard: name for shard, name in found if part_name(shard) == name}


def temporary_name(execution_id: str, name: str) -> str:
    """Return the name, matched by no reader's `*.parquet`, of what one execution writes before it is published."""
    return f"{TEMPORARY_PREFIX}{execution_id}.{name}.tmp"


def shard_job_id(run: str, shard: int, is_second: bool = False) -> str:
    """Return the id of a shard's job, in the letters that RQ allows. is_second: asks the second model of a cascade."""
    return f"{run}-{shard:05d}{'-2' if is_second else ''}"


def plan_job_id(run: str) -> str:
    return f"{run}-plan"


def run_and_shard(job_id: str) -> tuple[str, int | None] | None:
    """Return the run and the shard that a job's id tells, no shard of a planning's; None for a job of no run."""
    match = _JOB.fullmatch(job_id)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def job_shard(run: str, job_id: str) -> int | None:
    found = run_and_shard(job_id)
    return found[1] if found is not None and found[0] == run else None
