"""The names of a run's files and jobs."""

import re

from jobs.runs.plans.formats import OPENAI_BATCH

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
#: Where the keys of the parts' rows lie. The names in it begin so too: polars reads files of folders that do.
KEYS = "_keys"

REUSED = "_reused"
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(r"([0-9a-f]{16})-(?:plan|(\d+)(?:-2)?)", re.ASCII)
_PART = re.compile(r"part-(\d{5,})\.parquet")


def is_run_id(value: object) -> bool:
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


def part_name(shard: int) -> str:
    return f"part-{shard:05d}.parquet"


def keys_name(shard: int) -> str:
    return f"{KEYS}/_part-{shard:05d}.bin"


def kept_name(file: int, execution_id: str) -> str:
    """Return the name, below the run's folder, of the file that says which rows of an input a planning has chosen."""
    return f"{KEYS}/_rows-{file:05d}.{execution_id}.bin"


def output_names(single_file: str | None) -> tuple[str, ...]:
    """Return the names of what is written of all parts, in a format; none for a run whose output is parts."""
    if single_file == OPENAI_BATCH:
        return ("output.jsonl", "errors.jsonl")
    return () if single_file is None else (f"output.{single_file}",)


def part_shard(name: str) -> int | None:
    match = _PART.fullmatch(name)
    return int(match[1]) if match and part_name(int(match[1])) == name else None


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
