"""Earlier runs whose answers a new run takes: their keys in one index, and their answers part by part."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import pyarrow as pa

from jobs.errors import CannotReuse, InputNotFound, PartDamaged, PlanDamaged
from jobs.parquet.asks.row_keys import NO_KEYS, Keys
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.output_file import open_part
from jobs.parquet.outputs.part import read_part_stats
from jobs.parquet.outputs.plan_file import load_plan
from jobs.parquet.reuse.key_file import read_keys
from jobs.parquet.reuse.known_keys import KnownKeys, Places
from jobs.parquet.tables.columns import ColumnChoice
from jobs.runs.plans.names import KEYS, PLAN, part_shard
from jobs.runs.plans.plan import Plan

#: Of an old run so many parts that cannot be read are named.
MAX_NAMED = 10


@dataclass
class ReusedRun:
    """What a new run has of an old one. rows: that were taken. passed_over: parts that could not be read, and why."""

    output: str
    run: str
    rows: int = 0
    passed_over: list[str] = field(default_factory=list)

    def pass_over(self, error: PartDamaged | InputNotFound) -> None:
        """Note a part that cannot be read; its rows are computed."""
        if len(self.passed_over) < MAX_NAMED:
            self.passed_over.append(": ".join(map(str, (*error.args, "it is gone")[:2])))


@dataclass(frozen=True)
class OldPart:
    """A part with keys. first: the place of its first row among all old rows."""

    plan: Plan
    shard: int
    first: int
    told: ReusedRun


class OldRuns:
    """The runs that a submission names, as they are now; what comes into them later is not seen."""

    def __init__(self, storage: Storage, outputs: Sequence[str]) -> None:
        """Read their keys. Raises PathOutsideRoots, or CannotReuse for a folder that has nothing to take."""
        self._storage = storage
        self.told: list[ReusedRun] = []
        self.parts: list[OldPart] = []
        self.seed: int | None = None  # of the first of them
        found: list[tuple[Plan, int, ReusedRun]] = []
        for output in dict.fromkeys(storage.resolve(each) for each in outputs):
            run, plan = _plan_of(storage, output)
            self.seed = plan.seed if self.seed is None else self.seed
            self.told.append(ReusedRun(output, run))
            found += [(plan, shard, self.told[-1]) for shard in _answered(storage, plan)]
        firsts = [0, *accumulate(plan.shards[shard].rows for plan, shard, _ in found)]
        self.keys, marks = KnownKeys(firsts[-1]), list[Keys]()
        for plan, shard, told in found:
            storage.check_interrupted()
            try:
                keys, models = read_keys(storage, plan, shard)
            except PartDamaged as error:
                told.pass_over(error)
                continue
            self.parts.append(OldPart(plan, shard, self.keys.size, told))
            self.keys.add(keys)
            marks.append(models)
        self.marks = np.unique(np.concatenate([NO_KEYS, *marks]), axis=0)
        self.keys.sort()

    def answers(self, places: Places, schema: pa.Schema) -> Iterator[tuple[OldPart, Places, pa.RecordBatch]]:
        """Yield the answers at places, which ascend, part by part: which of the places, and their columns, by the names
        of `schema`, a new run's. Rows with an error, and parts that are damaged or lack a column, are left out."""
        for part in self.parts:
            rows = part.plan.shards[part.shard].rows
            begin, end = np.searchsorted(places, [part.first, part.first + rows])
            if begin < end:
                try:
                    yield from self._of_part(part, places, range(begin, end), schema)
                except (PartDamaged, InputNotFound) as error:
                    part.told.pass_over(error)

    def _of_part(
        self, part: OldPart, places: Places, which: range, schema: pa.Schema
    ) -> Iterator[tuple[OldPart, Places, pa.RecordBatch]]:
        path, rows = part.plan.part_path(part.shard), part.plan.shards[part.shard].rows
        read_part_stats(self._storage, path, part.told.run, part.shard, rows)  # its rows are those of the keys
        prefix = part.plan.spec.output_prefix
        names = [f"{prefix}{name}" for name in schema.names]
        wanted = places[which.start : which.stop] - part.first
        with open_part(self._storage, part.plan, part.shard, ColumnChoice(tuple(names))) as file:
            for field_, name in zip(schema, names, strict=True):
                place = file.schema.get_field_index(name)
                if place < 0 or file.schema.field(place).type != field_.type:
                    raise PartDamaged(path, f"it has no column {name!r} of {field_.type}")
            start = 0
            for batch in file.batches():
                self._storage.check_interrupted()
                begin, end = np.searchsorted(wanted, [start, start + batch.num_rows])
                taken = batch.select(names).take(pa.array(wanted[begin:end] - start))
                good = np.asarray(taken.column(f"{prefix}error").is_null())
                answers = pa.RecordBatch.from_arrays(taken.columns, schema=schema).filter(pa.array(good))
                yield part, which.start + begin + np.flatnonzero(good), answers
                start += batch.num_rows


def _plan_of(storage: Storage, output: str) -> tuple[str, Plan]:
    """Return a run's id, and its plan as of the folder that it lies in now."""
    try:
        plan = load_plan(storage, os.path.join(output, PLAN))
    except PlanDamaged as error:
        raise CannotReuse(output, f"{error.args[0]}: {error.args[1]}") from None
    return plan.run, replace(plan, spec=replace(plan.spec, output=output))  # it may have been moved


def _answered(storage: Storage, plan: Plan) -> list[int]:
    """Return the shards whose part is there. Raises CannotReuse where they have no keys."""
    shards = {part_shard(name) for name in _names(storage, plan.spec.parts_folder)}
    found = sorted(shard for shard in shards if shard is not None and shard < len(plan.shards))
    if found and not _names(storage, os.path.join(plan.spec.output, KEYS)):
        raise CannotReuse(plan.spec.output, f"it has parts, and no {KEYS}/ to find their rows by")
    return found


def _names(storage: Storage, folder: str) -> list[str]:
    """Return the names in a folder, which is made with the first of them."""
    try:
        return storage.names(folder)
    except FileNotFoundError:
        return []
