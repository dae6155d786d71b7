"""The plan of a run: its input files and shards, written once beside the output."""

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Self

from jobs.common.keys import FORMAT
from jobs.context.served_model import PinnedModel
from jobs.errors import InvalidJob
from jobs.runs.plans.names import INPUT, PARQUET, REUSED, part_name
from jobs.runs.plans.spec import RunSpec

#: Each shard is a job in Redis, a file in the output and a line in the plan.
MAX_SHARDS = 100_000
#: Shards of a run whose shares Redis keeps; those of a larger one count as equal.
MAX_SHARES = 10_000


class AnotherFormat(ValueError):
    """Raised with a plan's format if this version does not read it."""


@dataclass(frozen=True)
class AddedColumn:
    """A column that stands in no file: of folders named `key=value`, or of the files' paths."""

    name: str
    type: Literal["int64", "string"]


@dataclass(frozen=True)
class PlannedFile:
    """An input file as it was planned, with its size in bytes and its values in the plan's added columns.

    mtime_ns (Unix), etag: a file that has others now is looked at more closely. kept: rows of it that the run asks, if
    not all.
    """

    path: str
    size: int
    mtime_ns: int = field(compare=False)
    rows: int
    fingerprint: str
    values: tuple[Any, ...] = ()
    etag: str = field(default="", compare=False)
    kept: int | None = field(default=None, compare=False)

    @property
    def own_rows(self) -> int:
        return self.rows if self.kept is None else self.kept


@dataclass(frozen=True)
class Reused:
    """What planning has taken from earlier runs, into files of this name.

    asked: RowKeys.name as planning knew it. any_model: whether answers of other models were taken. runs: see ReusedRun.
    seed: the first earlier run's, if this run was given none.
    """

    name: str
    asked: str = ""
    any_model: bool = False
    runs: tuple[dict[str, Any], ...] = ()
    seed: int | None = None


class Shard(NamedTuple):
    """A range of rows of one file, from its first row `start`.

    first_group, num_groups: the row groups that hold the range. skip: rows of the first group before it.
    """

    file: int
    start: int
    rows: int
    first_group: int
    num_groups: int
    skip: int


@dataclass(frozen=True)
class Plan:
    """What a run does.

    seed: the source of every row's seed. added_columns: come behind the files'. columns: kinds by name
    (jobs.parquet.formats.kinds) for text files, which do not say them. as_json: columns that prompts read as each row's
    own JSON, since a type would be that of all rows. sizes: bytes of what each shard asks. second: the model that
    answers rows with low margins again. planned_at: Unix seconds, which chats take for the present. input_folder: has
    the Parquet files made from other inputs; by default it is in the output.
    """

    spec: RunSpec
    seed: int
    model: PinnedModel
    version: str
    files: tuple[PlannedFile, ...]
    shards: tuple[Shard, ...]
    added_columns: tuple[AddedColumn, ...] = ()
    input_format: str = PARQUET
    columns: tuple[tuple[str, Any], ...] = ()
    as_json: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    reused: Reused | None = None
    second: PinnedModel | None = None
    planned_at: float = 0.0
    input_folder: str | None = field(default=None, compare=False)

    @property
    def run(self) -> str:
        return self.spec.run

    @property
    def rows(self) -> int:
        found = sum(file.own_rows for file in self.files)
        return found if self.spec.limit is None else min(found, self.spec.limit)

    @property
    def shares(self) -> list[int]:
        """Each shard's share of the run's rows and bytes, in billionths; none of a very large run."""
        if len(self.sizes) != len(self.shards) or len(self.shards) > MAX_SHARES:
            return []
        return work_shares([shard.rows for shard in self.shards], self.sizes)

    def part_path(self, shard: int) -> str:
        return os.path.join(self.spec.parts_folder, part_name(shard))

    def reused_path(self, shard: int) -> str:
        """Return where answers for a shard's rows are that were taken from earlier runs."""
        assert self.reused is not None
        return os.path.join(self.spec.output, REUSED, f"_{self.reused.name}.{part_name(shard)}")

    @property
    def given_seed(self) -> int | None:
        """Return the seed that this run was given, or else the one that the first earlier run was given."""
        inherited = None if self.reused is None else self.reused.seed
        found: int | None = self.spec.sampling.get("seed", inherited)
        return found

    def model_of(self, is_second: bool) -> PinnedModel:
        return self.second if is_second and self.second else self.model

    def queues(self, queue: str) -> list[tuple[str, bool]]:
        """Return the queues of a shard's jobs in turn, and which asks the second model. queue: the run's."""
        return [(queue, False), *([(self.spec.escalate_to or queue, True)] if self.second else [])]

    @property
    def converted_folder(self) -> str:
        return self.input_folder or os.path.join(self.spec.output, INPUT)

    def rows_path(self, file: PlannedFile) -> str:
        """Return the Parquet file with the rows of an input, where it keeps any: itself, or what was made of it."""
        if self.input_format == PARQUET and not file.kept:
            return file.path
        text = json.dumps([file.fingerprint, file.rows, self.columns])
        if file.kept:
            assert self.reused is not None
            text += self.reused.name
        name = f"{blake2b(text.encode(), digest_size=16).hexdigest()}.parquet"
        return os.path.join(self.converted_folder, name)

    def first_row(self, shard: int) -> int:
        planned = self.shards[shard]
        return self._first_rows[planned.file] + planned.start

    def shards_of(self, rows: Set[int]) -> list[int]:
        starts = [self.first_row(shard) for shard in range(len(self.shards))]
        return sorted({bisect_right(starts, row) - 1 for row in rows})

    @cached_property
    def _first_rows(self) -> list[int]:
        """Return the number of each file's first row; each of ten thousand shards asks for one."""
        return [0, *accumulate(file.own_rows for file in self.files)]

    @property
    def _digest(self) -> str:
        """Name the numbers by which rows are found: a changed one would show nowhere else."""
        found = blake2b(digest_size=8)
        for each in (self.seed, *(file.own_rows for file in self.files), *self.shards):
            found.update(json.dumps(each).encode())
        return found.hexdigest()

    def to_text(self) -> str:
        content = {
            "format": FORMAT,
            "run": self.run,
            "arguments": self.spec.to_json(),
            **{each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_AS_IT_IS},
            "shard_fields": Shard._fields,
            "digest": self._digest,
        }
        # One by one: at once, ten thousand shards would leave 10 MiB of small strings in the worker's heap.
        shards = ", ".join(map(json.dumps, self.shards))
        return f'{json.dumps(content, default=asdict)[:-1]}, "shards": [{shards}]}}'

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote. Raises AnotherFormat, and ValueError for anything else, bad JSON too."""
        content = json.loads(text)
        if not isinstance(content, dict) or type(content.get("format")) is not int:
            raise ValueError("it is no plan of a run")
        if content["format"] != FORMAT:
            raise AnotherFormat(content["format"])
        try:
            plan = cls(
                spec=RunSpec(**content["arguments"]),
                seed=content["seed"],
                model=PinnedModel(**content["model"]),
                version=content["version"],
                files=tuple(PlannedFile(**{**file, "values": tuple(file["values"])}) for file in content["files"]),
                shards=tuple(map(Shard._make, content["shards"])),
                added_columns=tuple(AddedColumn(**column) for column in content["added_columns"]),
                input_format=content["input_format"],
                columns=tuple((name, kind) for name, kind in content["columns"]),
                as_json=tuple(content.get("as_json", ())),  # earlier plans have none
                sizes=tuple(content["sizes"]),
                reused=None if content["reused"] is None else Reused(**content["reused"]),
                second=PinnedModel(**content["second"]) if content.get("second") else None,
                planned_at=content["planned_at"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or wrong: {error}") from None
        if plan.run != content.get("run"):
            raise ValueError("its arguments do not give its run id")
        if content.get("digest", own := plan._digest) != own:  # earlier plans have none
            raise ValueError("numbers of rows are not as they were written")
        return plan


_NOT_AS_IT_IS = ("spec", "shards", "input_folder")


def work_shares(rows: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return what Plan.shares does, for shards of so many rows and bytes."""
    scale, all_rows, all_bytes = 10**9, sum(rows) or 1, sum(sizes) or 1
    return [round(scale * (a / all_rows + b / all_bytes)) for a, b in zip(rows, sizes, strict=True)]


#: Towards a run's end a shard holds the rows that are left divided by this, so that workers end together; at least so
#: many as keep a worker's batch filled.
TAIL_SHARE = 8
MIN_TAIL_ROWS = 128


def cut_shards(row_groups: Sequence[Sequence[int]], rows_per_shard: int, limit: int | None = None) -> tuple[Shard, ...]:
    """Cut files into shards of at most `rows_per_shard` rows, each within one file, in row order.

    The last ones of a run of more than TAIL_SHARE shards are smaller. row_groups: for each file the row count of each
    of its row groups. limit: of them all, only so many rows. No row at all gives one empty shard, so that every run has
    a part and readers find the schema. Raises InvalidJob beyond MAX_SHARDS.
    """
    rows = sum(map(sum, row_groups))
    rows = rows if limit is None else min(rows, limit)
    shards = list(_cut(row_groups, rows_per_shard, rows)) if rows // rows_per_shard <= MAX_SHARDS else None
    if shards is None or len(shards) > MAX_SHARDS:
        raise InvalidJob(
            f"{rows} rows in {len(row_groups)} files make more than {MAX_SHARDS} shards of at most "
            f"{rows_per_shard} rows: give a larger rows_per_shard, or make several runs of it"
        )
    return tuple(shards) or (Shard(file=0, start=0, rows=0, first_group=0, num_groups=0, skip=0),)


def _cut(row_groups: Sequence[Sequence[int]], most: int, left: int) -> Iterator[Shard]:
    """Yield shards of at most so many rows, for the first ones of the files. left: how many of those."""
    least = most if left <= TAIL_SHARE * most else max(most // TAIL_SHARE, min(most, MIN_TAIL_ROWS))
    for number, groups in enumerate(row_groups):
        ends, start = list(accumulate(groups)), 0
        while left and ends and start < ends[-1]:
            wanted = min(most, max(least, left // TAIL_SHARE))
            rows = min(wanted, ends[-1] - start, left)
            yield _shard(number, ends, start, rows)
            start, left = start + rows, left - rows


def _shard(file: int, ends: Sequence[int], start: int, rows: int) -> Shard:
    """Find the row groups of one range. ends: for each row group, the row after its last."""
    first = bisect_right(ends, start)
    last = bisect_left(ends, start + rows)
    group_start = ends[first - 1] if first else 0
    return Shard(file, start, rows, first, last - first + 1, start - group_start)
