"""Earlier runs whose answers a new run takes: the keys of their rows, an index of these, and answers part by part.

A key file lies beside the parts, one for each. Its layout is fixed, little-endian: a digest of run, shard and what
follows, the number of the models that answered as 64 bits, their marks (jobs.parquet.asks.row_keys), and 16 bytes for
each row.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.errors import CannotReuse, InputNotFound, PartDamaged, PathSwapped, PlanDamaged, PlanOfAnotherVersion
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import NO_KEYS, SIZE, Keys, as_keys, model_mark
from jobs.parquet.files.storage import Storage, reading
from jobs.parquet.outputs.part import read_part_stats
from jobs.parquet.outputs.run_folder import load_plan
from jobs.parquet.reuse.taken_answers import UNREADABLE
from jobs.parquet.tables.columns import ColumnChoice
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import JOURNAL, KEY, KEYS, OPENAI_BATCH, PLAN, ROW, SUCCESS, keys_name, part_shards
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec

#: Models that may have answered a part's rows, and those of all parts that are looked for.
MAX_MODELS = MAX_LOOKED_FOR = 64


def write_keys(storage: Storage, plan: Plan, shard: int, keys: Keys, marks: Keys, execution_id: str) -> None:
    """Put a part's keys in place, unless there. keys: zeros for no answer. marks: of each row's model."""
    keys, marks = np.where(keys.any(axis=1, keepdims=True), keys ^ marks, 0), np.unique(marks, axis=0)
    path = os.path.join(plan.spec.output, keys_name(shard))
    body = len(marks).to_bytes(8, "little") + marks.tobytes() + keys.tobytes()
    storage.make_folder(os.path.dirname(path))
    storage.put(path, execution_id, lambda sink: sink.write(_digest(plan.run, shard, body) + body))


def read_keys(storage: Storage, plan: Plan, shard: int, run: str) -> tuple[Keys, Keys]:
    """Return a part's keys, and the marks of the models in them. run: that wrote them. Raises PartDamaged."""
    path, rows = os.path.join(plan.spec.output, keys_name(shard)), plan.shards[shard].rows
    try:
        with reading(path), storage.open_input(path) as source:
            found = bytes(source.read(24 + (MAX_MODELS + rows) * SIZE))
    except (InputNotFound, PathSwapped):
        raise PartDamaged(path, "there is no such file") from None
    digest, body = found[:16], found[16:]
    if digest != _digest(run, shard, body) or len(body) % SIZE != 8:
        raise PartDamaged(path, "it holds no keys, or others than were written for it")
    num_marks, keys = int.from_bytes(body[:8], "little"), as_keys(body[8:])
    if len(keys) != num_marks + rows:
        raise PartDamaged(path, f"it has the keys of {len(keys) - num_marks} rows, expected {rows}")
    return keys[num_marks:], keys[:num_marks]


def _digest(run: str, shard: int, body: bytes) -> bytes:
    return blake2b(body, digest_size=16, key=f"{run} {shard}".encode(), person=b"tokenmill keys").digest()


#: Of so many equal keys each is found in its turn; of more, the first of them.
MAX_EQUAL = 1000

Places = npt.NDArray[np.int64]


class KnownKeys:
    """Finds keys among others, in at most 32 bytes for each of these. keys: the others; zeros are never found."""

    def __init__(self, keys: Keys) -> None:
        self.all, self._second = keys, keys[:, 1]
        self._order = np.argsort(keys[:, 0], kind="stable").astype(np.uint32)
        self._first, self._taken = keys[self._order, 0], np.zeros(len(keys), np.uint32)

    def forget(self, places: Places) -> None:
        self._second[places] = 0

    def find(self, keys: Keys) -> Places:
        """Return the place of each key among the known ones, -1 where it is not.

        Equal ones are given out in their order: rows that ask the same keep answers of their own.
        """
        first = np.ascontiguousarray(keys[:, 0])
        lows, highs = (np.searchsorted(self._first, first, side) for side in ("left", "right"))
        found = np.full(len(keys), -1, np.int64)
        single = (highs - lows == 1) & keys.any(axis=1)
        places = self._order[lows[single]].astype(np.int64)
        found[single] = np.where(self._second[places] == keys[single, 1], places, -1)
        for row in np.flatnonzero((highs - lows > 1) & keys.any(axis=1)):
            equal = self._order[lows[row] : min(highs[row], lows[row] + MAX_EQUAL)]
            equal = equal[self._second[equal] == keys[row, 1]]
            if len(equal):
                found[row] = equal[self._taken[equal[0]] % len(equal)]
                self._taken[equal[0]] += 1
        return found


MAX_NAMED = 10
_JOURNAL = re.compile(r"_(?:kept\.)?(\d{5,9})\.(?:.*\.)?answers\b", re.ASCII)


@dataclass
class ReusedRun:
    """What a new run has taken from an old one.

    rows: how many. passed_over: files that could not be read, and why. differs: what the old run asked differently, if
    less than half of the new run's rows were taken.
    """

    output: str
    run: str
    rows: int = 0
    passed_over: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def pass_over(self, error: Exception) -> None:
        if len(self.passed_over) < MAX_NAMED:
            self.passed_over.append(": ".join(map(str, (*error.args, "it is gone")[:2])))


@dataclass(frozen=True)
class OldPart:
    """A part with keys; of a shard that has none its journal. first: the place of its first row among all old rows."""

    plan: Plan
    shard: int
    first: int
    told: ReusedRun
    journal: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.plan.shards[self.shard].rows


class OldRuns:
    """The runs that a submission names, as they are now; what comes into them later is not seen."""

    def __init__(self, storage: Storage, outputs: Sequence[str], new: Plan) -> None:
        """Read their keys. Raises PathOutsideRoots, or CannotReuse for a folder that has nothing to take."""
        self._storage, self._new = storage, new
        self.told: list[ReusedRun] = []
        self.parts: list[OldPart] = []
        self.plans: list[Plan] = []
        size = 0
        for output in dict.fromkeys(storage.resolve(each) for each in outputs):
            try:
                plan = load_plan(storage, os.path.join(output, PLAN))
            except PlanDamaged as error:
                raise CannotReuse(output, f"{error.args[0]}: {error.args[1]}") from None
            except PlanOfAnotherVersion as error:
                raise CannotReuse(output, f"{error.args[1]} version of Tokenmill has planned it") from None
            run, plan = plan.run, replace(plan, spec=replace(plan.spec, output=output))  # it may have been moved
            self.plans.append(plan)
            self.told.append(ReusedRun(output, run))
            answered = _answered(storage, plan)
            if storage.stat(os.path.join(output, SUCCESS)) is not None:
                for shard in set(range(len(plan.shards))) - answered.keys():
                    self.told[-1].pass_over(PartDamaged(plan.part_path(shard), "it is gone"))
            if (reason := _unlike(plan, new)) is not None:
                self.told[-1].pass_over(CannotReuse(output, reason))
                continue
            for shard, journal in sorted(answered.items()):
                self.parts.append(OldPart(plan, shard, size, self.told[-1], tuple(journal)))
                size += self.parts[-1].num_rows
        keys, marks = np.zeros((size, 2), np.uint64), [NO_KEYS]
        for part in self.parts:
            storage.check_interrupted()
            own = keys[part.first : part.first + part.num_rows]
            try:
                if part.journal:
                    self._read_journal(part, own)
                    marks.append(model_mark(part.plan.model))
                else:
                    own[:], models = read_keys(storage, part.plan, part.shard, part.told.run)
                    marks.append(models)
            except PartDamaged as error:
                part.told.pass_over(error)
        self.keys, self.marks = KnownKeys(keys), np.unique(np.concatenate(marks), axis=0)[:MAX_LOOKED_FOR]

    def _read_journal(self, part: OldPart, keys: Keys) -> None:
        for path in part.journal:
            try:
                with closing(TableReading(self._storage, path, ColumnChoice((ROW, KEY)))) as file:
                    for batch in file.batches:
                        keys[batch.column(ROW).fill_null(-1)] = as_keys(b"".join(batch.column(KEY).to_pylist()))
            except (*UNREADABLE, ArithmeticError, LookupError, TypeError, ValueError) as error:
                part.told.pass_over(error if isinstance(error, UNREADABLE) else PartDamaged(path, "it has no keys"))

    def answers(self, places: Places, schema: pa.Schema) -> Iterator[tuple[OldPart, Places, pa.RecordBatch]]:
        """Yield the answers at places, which ascend, part by part: which of the places, and their columns, by the names
        of `schema`, a new run's. Rows with an error, and files that are damaged or lack a column, are left out."""
        for part in self.parts:
            begin, end = np.searchsorted(places, [part.first, part.first + part.num_rows])
            wanted, is_open = places[begin:end] - part.first, np.ones(end - begin, bool)
            for path in (part.journal or [part.plan.part_path(part.shard)]) if begin < end else ():
                try:
                    for found, batch in self._of_file(part, path, wanted, schema):
                        new = is_open[found]
                        is_open[found] = False
                        yield part, begin + found[new], batch.filter(pa.array(new))
                except UNREADABLE as error:
                    part.told.pass_over(error)

    def _of_file(
        self, part: OldPart, path: str, wanted: Places, schema: pa.Schema
    ) -> Iterator[tuple[Places, pa.RecordBatch]]:
        prefix = "" if part.journal else part.plan.spec.output_prefix
        if not part.journal:  # its rows are those of the keys
            read_part_stats(self._storage, part.plan, part.shard, part.told.run)
        own = pa.schema([each.with_name(f"{prefix}{each.name}") for each in schema])
        read = own.append(pa.field(ROW, pa.int64())) if part.journal else own
        telling = () if _lengths(part.plan) == _lengths(self._new) else _tell_cuts(part.plan.spec)
        telling = tuple(f"{prefix}{name}" for name in telling)
        with closing(TableReading(self._storage, path, ColumnChoice((*read.names, *telling)))) as file:
            for each in read:
                place = file.schema.get_field_index(each.name)
                if place < 0 or file.schema.field(place).type != each.type:
                    raise PartDamaged(path, f"it has no column {each.name!r} of {each.type}")
            start = 0
            for batch in file.batches:
                self._storage.check_interrupted()
                rows: Places = np.arange(start, start := start + batch.num_rows)
                if part.journal:
                    rows = np.asarray(batch.column(ROW).fill_null(-1))
                begin, end = np.searchsorted(wanted, [rows.min(initial=part.num_rows), rows.max(initial=-1) + 1])
                order = np.argsort(rows, kind="stable")
                places = order[np.searchsorted(rows, wanted[begin:end], sorter=order)]
                found = np.flatnonzero(rows[places] == wanted[begin:end])  # so that none is copied for another row
                chosen = batch.take(pa.array(places[found]))
                good = np.asarray(chosen.column(f"{prefix}error").is_null())
                for name in telling:
                    good &= _is_whole(chosen.column(name))
                taken = chosen.select(own.names)
                answers = pa.RecordBatch.from_arrays(taken.columns, schema=schema).filter(pa.array(good))
                yield begin + found[good], answers


def _lengths(plan: Plan) -> set[int]:
    return {model.max_model_len for model in (plan.model, plan.second) if model is not None}


def _unlike(old: Plan, new: Plan) -> str | None:
    """Say why nothing of an old run can be taken because the model's length differs; None if something can."""
    if _lengths(old) == _lengths(new):
        return None
    if max(_lengths(old)) > min(_lengths(new)):
        return f"its answers were given up to {max(_lengths(old))} tokens, and the model takes {min(_lengths(new))} now"
    if old.spec.prompts:
        return "its rows have several prompts, any of which another max_model_len may have cut"
    return None


def _tell_cuts(spec: RunSpec) -> tuple[str, ...]:
    """Return a run's columns that show which answers were cut."""
    names = [field.name for field in kind_of(spec).fields(spec, 0)]
    wanted = ("completion", "finish_reason") if spec.input_format == OPENAI_BATCH else ("finish_reason",)
    return tuple(name for name in wanted if name in names)


#: A finish reason in a response's JSON. Texts in it cannot match, as their quotation marks have a backslash.
_CUT_CHOICE = '"finish_reason": "length"'


def _is_whole(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether no answer of a row was cut. column: reasons, lists of reasons, or responses."""
    return np.array([not _is_cut(value) for value in column.to_pylist()], bool)


def _is_cut(value: str | list[str] | None) -> bool:
    if isinstance(value, list):
        return "length" in value
    return value is not None and (value == "length" or _CUT_CHOICE in value)


def _answered(storage: Storage, plan: Plan) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name in storage.names(folder := os.path.join(plan.spec.output, JOURNAL)):
        if (match := _JOURNAL.match(name)) is not None:
            found.setdefault(int(match[1]), []).append(os.path.join(folder, name))
    shards = part_shards(storage.names(plan.spec.parts_folder))
    if shards and not storage.names(os.path.join(plan.spec.output, KEYS)):
        raise CannotReuse(plan.spec.output, f"it has parts, and no {KEYS}/ to find their rows by")
    found |= {shard: [] for shard in shards}
    return {shard: journal for shard, journal in found.items() if shard < len(plan.shards)}
