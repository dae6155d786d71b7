"""A run whose input has gained rows: what its plan becomes (`--extend`).

What is planned stays, so that parts and seeds are as they were. What is new comes behind it: files that were
not there, and rows behind the end of a file of lines, as another file of the same path. Of a run without any
row nothing but its seed is kept: what columns hold is told by rows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jobs.errors import InputChanged
from jobs.parquet.files.fingerprint import prefix_fingerprint
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converter import codec_of
from jobs.parquet.planning.inputs import Inputs
from jobs.runs.plans.formats import LINES, OPENAI_BATCH
from jobs.runs.plans.partitions import FoundFile
from jobs.runs.plans.plan import Extension, Plan, PlannedFile, cut_further, cut_shards
from jobs.runs.refusals import CannotExtend

_APART = (
    "put the new rows into a file of their own beside it, in a folder or a glob that is submitted, or submit "
    "it with another output"
)
_ELSEWHERE = "submit the new files with another output"

#: Whether a file that has grown begins with what was planned of it.
Begins = Callable[[PlannedFile], bool]


def in_planned_order(found: Sequence[FoundFile], plan: Plan) -> list[FoundFile]:
    """Return the files of an input with those first that a plan has, in its order."""
    places = {path: place for place, path in enumerate(dict.fromkeys(file.path for file in plan.files))}
    return sorted(found, key=lambda file: places.get(file.path, len(places)))


def extended(plan: Plan, inputs: Inputs, asked: list[str], begins: Begins, now: float) -> Plan | None:
    """Return a plan with what its input has gained behind it; None where it is as planned.

    inputs: in planned order. asked: how they were named. now: Unix seconds. Raises InputChanged or CannotExtend.
    """
    planned, last = _shares(plan), plan.files[-1].path
    found = {file.path: file for file in inputs.files}
    if not plan.rows and any(file.rows for file in inputs.files):
        return _begun(plan, inputs, asked, now)
    _check_columns(plan, inputs)
    for path in planned:
        if path not in found:
            raise InputChanged(path, "it is not in the input any more")
    changed = {path for path, share in planned.items() if share != replace(found[path], begin=0, end=None)}
    more: list[PlannedFile] = []
    for path, file in found.items():
        if path not in planned:
            more.append(file)
        elif path in changed:
            _check_grown(plan, planned[path], file, begins, path == last)
            if file.rows > planned[path].rows:
                more.append(replace(file, begin=planned[path].rows))
    if not more and not changed:
        return None
    files = tuple(_with_state(file, found[file.path], planned[file.path]) for file in plan.files)
    groups = {file.path: rows for file, rows in zip(inputs.files, inputs.row_groups, strict=True)}
    shards = cut_further(
        plan.shards,
        len(files),
        [groups[file.path] for file in more],
        [file.begin for file in more],
        plan.spec.rows_per_shard,
    )
    gained = Extension(now, asked, len(more), sum(file.own_rows for file in more))
    return replace(
        plan,
        files=(*files, *more),
        shards=shards,
        repeated=inputs.repeated,
        extensions=(*plan.extensions, gained),
        file_state=None,
    )


def _begun(plan: Plan, inputs: Inputs, asked: list[str], now: float) -> Plan:
    """Return the plan of a run that had no row. Its one part, in which there is none either, is replaced."""
    gained = Extension(now, asked, len(inputs.files), sum(file.rows for file in inputs.files))
    return replace(
        plan,
        files=inputs.files,
        shards=cut_shards(inputs.row_groups, plan.spec.rows_per_shard),
        added_columns=inputs.added_columns,
        input_format=inputs.input_format,
        columns=inputs.columns,
        repeated=inputs.repeated,
        extensions=(*plan.extensions, gained),
        file_state=None,
    )


def by_planned_file(plan: Plan, inputs: Inputs) -> Inputs:
    """Return inputs with an entry for each file that a plan has, where it has one of them several times."""
    places = {file.path: place for place, file in enumerate(inputs.files)}
    order = [places[file.path] for file in plan.files]
    sizes = tuple(inputs.group_bytes[place] for place in order) if inputs.group_bytes else ()
    groups = tuple(inputs.row_groups[place] for place in order)
    return replace(inputs, files=plan.files, row_groups=groups, group_bytes=sizes)


def check_as_planned(storage: Storage, plan: Plan, inputs: Inputs) -> None:
    """Raise InputChanged for the first file that is not as planned. inputs: in planned order."""
    planned = _shares(plan)
    found = {file.path: file for file in inputs.files}
    for path in [*found, *planned]:
        if path not in planned:
            raise InputChanged(path, "it is new")
        if path not in found:
            raise InputChanged(path, storage.what_is_there(path))
        if planned[path] != found[path]:
            raise InputChanged(path, _difference(planned[path], found[path]))
    if not plan.extensions and list(planned) != list(found):
        raise InputChanged(plan.spec.input[0], "its files come in another order")


def _difference(planned: PlannedFile, found: PlannedFile) -> str:
    for name in ("size", "rows", "values"):
        if getattr(planned, name) != getattr(found, name):
            return f"{name}: planned {getattr(planned, name)}, found {getattr(found, name)}"
    return f"it has the same {found.size} bytes, but other contents"


def begins_as_planned(storage: Storage, file: PlannedFile) -> bool:
    """Whether the first bytes of a file are those that were planned, and end where a line does: those of a
    compressed file do not tell."""
    with storage.open_input(file.path) as source:
        if codec_of(source.read_at(4, 0)) is not None:
            return False
        around = source.read_at(2, max(0, file.size - 1)) if file.size else b"\n"
    ends_a_line = around[:1] == b"\n" or around[1:] in (b"\n", b"\r")
    return ends_a_line and prefix_fingerprint(storage, file.path, file.size) == file.fingerprint


def _shares(plan: Plan) -> dict[str, PlannedFile]:
    """Return each file of a plan once, as it was when the plan was made."""
    return {file.path: replace(file, begin=0, end=None) for file in plan.files}


def _check_columns(plan: Plan, inputs: Inputs) -> None:
    """Raise CannotExtend where the output would get other columns than the parts that are there."""
    path = inputs.files[-1].path
    if inputs.input_format != plan.input_format:
        what = f"its files are {inputs.input_format}, and the run's were {plan.input_format}"
        raise CannotExtend(path, what, _ELSEWHERE)
    for kind, old, new in (
        ("columns that folders and names give", plan.added_columns, inputs.added_columns),
        ("columns", _plain(plan.columns), _plain(inputs.columns)),
    ):
        if old != new and sorted(old, key=str) == sorted(new, key=str):
            raise CannotExtend(path, f"with it the {kind} come in another order", _ELSEWHERE)
        if old != new:
            became, were = _told(new, old), _told(old, new)
            what = f"with it the {kind} become {became}, and in the run's parts are {were}"
            raise CannotExtend(path, what, _ELSEWHERE)


def _plain(columns: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return columns as a plan that was read has them."""
    return list(json.loads(json.dumps(columns)))


def _told(columns: Sequence[Any], others: Sequence[Any]) -> str:
    return ", ".join(str(each) for each in columns if each not in others) or "fewer"


def _check_grown(plan: Plan, planned: PlannedFile, found: PlannedFile, begins: Begins, is_last: bool) -> None:
    """Raise unless a file that is not as planned is so but for rows behind its end."""
    if found.size <= planned.size or found.rows < planned.rows or found.values != planned.values:
        raise InputChanged(found.path, _difference(planned, found))
    if plan.input_format not in LINES:
        what = f"a {plan.input_format} file that is written anew does not show that its first rows stayed"
        raise CannotExtend(found.path, what, _APART)
    if plan.input_format == OPENAI_BATCH and not is_last:
        raise CannotExtend(found.path, "rows of openai-batch files are added behind the last one", _APART)
    if not begins(planned):
        what = f"its first {planned.size} bytes do not show the lines that were planned"
        raise CannotExtend(found.path, what, _APART)


def _with_state(file: PlannedFile, found: PlannedFile, planned: PlannedFile) -> PlannedFile:
    """Return a planned file as it is now, with the rows that it stands for."""
    end = planned.rows if file.end is None and found.rows > planned.rows else file.end
    return replace(found, begin=file.begin, end=end)
