"""Formats of a run's input files, and which one a file's name tells. Needs no pyarrow."""

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
