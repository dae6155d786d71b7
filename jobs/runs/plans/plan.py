"""The plan of a run: its input files and shards. It is written once, beside the output."""

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
#: Redis keeps each shard's share of the run's work only if the run has at most this many shards. In a run with more
#: shards, all shards count as equal.
MAX_SHARES = 10_000


class AnotherFormat(ValueError):
    """Raised if this version cannot read a plan's format."""

    def __init__(self, number: int) -> None:
        super().__init__(f"its format is {number}, and this version reads {FORMAT}")
        self.number = number


@dataclass(frozen=True)
class AddedColumn:
    """A column that planning adds to the files' columns.

    Its values are the files' paths, or come from the names of folders such as `year=2024`.
    """

    name: str
    type: Literal["int64", "string"]


@dataclass(frozen=True)
class PlannedFile:
    """An input file as it was planned.

    size: in bytes. mtime_ns, etag: if one of these has changed, the file's content is compared with `fingerprint`.
    values: the file's values in the plan's added columns.
    num_chosen: how many of the file's rows planning has chosen for the run; None for all.
    """

    path: str
    size: int
    mtime_ns: int = field(compare=False)
    rows: int
    fingerprint: str
    values: tuple[Any, ...] = ()
    etag: str = field(default="", compare=False)
    num_chosen: int | None = field(default=None, compare=False)

    @property
    def num_asked(self) -> int:
        """Return the number of this file's rows for which the run asks the model."""
        return self.rows if self.num_chosen is None else self.num_chosen


@dataclass(frozen=True)
class Reused:
    """The answers that planning has taken from earlier runs.

    name: the id of the planner's execution. It is in the names of the files that hold these answers; see
    `Plan.reused_path`.
    any_model: whether answers of other models were taken. runs: see ReusedRun.
    seed: the seed that the first earlier run was given, if this run was given none.
    """

    name: str
    any_model: bool = False
    runs: tuple[dict[str, Any], ...] = ()
    seed: int | None = None


class Shard(NamedTuple):
    """A range of rows of one file.

    file: the file's index in the plan. start: the index of the range's first row in the file.
    first_group, num_groups: the row groups that hold the range. skip: the number of rows of the first group that come
    before the range.
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

    seed: every row's seed is computed from this seed and the row's number.
    added_columns: columns that come after the files' own.
    columns: for text files, because they have no types: the columns' names and kinds (jobs.parquet.formats.kinds).
    as_json: columns of JSON lines that are read twice: as values of the type that all rows share, and as each row's own
    JSON. Prompts and outputs show the JSON, which does not depend on other rows.
    sizes: for each shard, the bytes of its rows.
    second: in a cascade, the model that is asked again about rows with a low margin.
    planned_at: Unix seconds. Chat templates take this as the present time.
    input_folder: the folder of Parquet files that were made from inputs of other formats. By default it is in the
    output.
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
        """Return the run's id."""
        return self.spec.run

    @property
    def rows(self) -> int:
        """Return the number of rows for which the run asks the model."""
        num_rows = sum(file.num_asked for file in self.files)
        if self.spec.limit is not None:
            num_rows = min(num_rows, self.spec.limit)
        return num_rows

    @property
    def shares(self) -> list[int]:
        """Return each shard's share of the run's work (see `work_shares`).

        The list is empty if the run has more than MAX_SHARES shards, or if the plan has no sizes.
        """
        if len(self.sizes) != len(self.shards) or len(self.shards) > MAX_SHARES:
            return []
        return work_shares([shard.rows for shard in self.shards], self.sizes)

    def part_path(self, shard: int) -> str:
        """Return the path of a shard's part."""
        return os.path.join(self.spec.parts_folder, part_name(shard))

    def reused_path(self, shard: int) -> str:
        """Return the path of the file that holds a shard's answers from earlier runs."""
        assert self.reused is not None
        return os.path.join(self.spec.output, REUSED, f"_{self.reused.name}.{part_name(shard)}")

    @property
    def given_seed(self) -> int | None:
        """Return the seed that this run was given, or else the seed that the first reused run was given."""
        reused_seed = None if self.reused is None else self.reused.seed
        seed: int | None = self.spec.sampling.get("seed", reused_seed)
        return seed

    def model_of(self, is_second: bool) -> PinnedModel:
        """Return the model that a job asks. is_second: whether the job asks a cascade's second model."""
        if is_second and self.second is not None:
            return self.second
        return self.model

    def queues(self, queue: str) -> list[tuple[str, bool]]:
        """Return a pair for each job of a shard: the job's queue, and whether the job asks the second model.

        queue: the run's queue, which is the queue of a shard's first job.
        """
        queues = [(queue, False)]
        if self.second:
            queues.append((self.spec.escalate_to or queue, True))
        return queues

    @property
    def converted_folder(self) -> str:
        """Return the folder of the Parquet files that were made from inputs of other formats."""
        return self.input_folder or os.path.join(self.spec.output, INPUT)

    def rows_path(self, file: PlannedFile) -> str:
        """Return the path of the Parquet file that holds an input's rows: the input itself, or a file made from it."""
        # If num_chosen is None, the run uses all rows. If it is 0, the run never reads the file.
        has_chosen_rows = file.num_chosen not in (None, 0)
        if self.input_format == PARQUET and not has_chosen_rows:
            return file.path
        content = json.dumps([file.fingerprint, file.rows, self.columns])
        if has_chosen_rows:
            # Several planners may write files of chosen rows. Each has a `reused.name` of its own.
            assert self.reused is not None
            content += self.reused.name
        name = f"{blake2b(content.encode(), digest_size=16).hexdigest()}.parquet"
        return os.path.join(self.converted_folder, name)

    def first_row(self, shard: int) -> int:
        """Return the number of a shard's first row, counted over the whole input."""
        row_range = self.shards[shard]
        return self._first_rows[row_range.file] + row_range.start

    def shards_of(self, rows: Set[int]) -> list[int]:
        """Return the shards that hold these rows, in ascending order."""
        first_rows = [self.first_row(shard) for shard in range(len(self.shards))]
        shards = set()
        for row in rows:
            # The last shard that begins at the row or before it holds the row.
            shards.add(bisect_right(first_rows, row) - 1)
        return sorted(shards)

    @cached_property
    def _first_rows(self) -> list[int]:
        """Return the number of each file's first row, and at the end the number of all rows.

        The list is cached, because it is used for each of ten thousand shards.
        """
        return [0, *accumulate(file.num_asked for file in self.files)]

    @property
    def _digest(self) -> str:
        """Return a digest of the seed, of the files' numbers of rows, and of the shards.

        If somebody changes one of these in a plan's file, the digest in the file no longer matches.
        """
        rows_of_files = [file.num_asked for file in self.files]
        digest = blake2b(digest_size=8)
        for number_or_shard in (self.seed, *rows_of_files, *self.shards):
            digest.update(json.dumps(number_or_shard).encode())
        return digest.hexdigest()

    def to_text(self) -> str:
        """Return the plan as JSON."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "run": self.run,
            "arguments": self.spec.to_json(),
        }
        for plan_field in fields(self):
            if plan_field.name not in _WRITTEN_OTHERWISE:
                content[plan_field.name] = getattr(self, plan_field.name)
        content["shard_fields"] = Shard._fields
        content["digest"] = self._digest
        # Shards are encoded one by one. One call for ten thousand shards leaves 10 MiB of small strings in the heap.
        shards = ", ".join(map(json.dumps, self.shards))
        without_shards = json.dumps(content, default=_as_object)
        # The shards are put before the closing brace.
        return without_shards.removesuffix("}") + f', "shards": [{shards}]' + "}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote. Raises AnotherFormat, or ValueError for anything else."""
        content = json.loads(text)
        if not isinstance(content, dict) or type(content.get("format")) is not int:
            raise ValueError("it is no plan of a run")
        if content["format"] != FORMAT:
            raise AnotherFormat(content["format"])
        try:
            plan = cls(
                spec=RunSpec.from_json(content["arguments"]),
                seed=content["seed"],
                model=_model(content["model"]),
                version=content["version"],
                files=tuple(_planned_file(file) for file in content["files"]),
                shards=tuple(map(Shard._make, content["shards"])),
                added_columns=tuple(AddedColumn(**column) for column in content["added_columns"]),
                input_format=content["input_format"],
                columns=tuple((name, kind) for name, kind in content["columns"]),
                as_json=tuple(content.get("as_json", ())),  # plans of earlier versions lack this
                sizes=tuple(content["sizes"]),
                reused=_reused(content["reused"]),
                second=_second(content.get("second")),
                planned_at=content["planned_at"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or wrong: {error}") from None
        if plan.run != content.get("run"):
            raise ValueError("its arguments do not give its run id")
        has_digest = "digest" in content  # plans of earlier versions have no digest
        if has_digest and content["digest"] != plan._digest:
            raise ValueError("numbers of rows are not as they were written")
        return plan


def _as_object(value: Any) -> dict[str, Any]:
    """Return a record as a mapping. A model's empty `adapters` are left out, because older versions lack the field."""
    content = asdict(value)
    if isinstance(value, PinnedModel) and not value.adapters:
        del content["adapters"]
    return content


def _model(content: dict[str, Any]) -> PinnedModel:
    """Return a model from its object in the plan's JSON (see `_as_object`)."""
    adapters = tuple(content.get("adapters", ()))  # JSON has lists in place of tuples
    values = {**content, "adapters": adapters}
    return PinnedModel(**values)


def _second(content: dict[str, Any] | None) -> PinnedModel | None:
    """Return the second model from its object in the plan's JSON; None if the plan has no second model."""
    return _model(content) if content else None


def _reused(content: dict[str, Any] | None) -> Reused | None:
    """Return a Reused from its object in the plan's JSON; None if the plan takes no answers from earlier runs."""
    return None if content is None else Reused(**content)


def _planned_file(content: dict[str, Any]) -> PlannedFile:
    """Return a PlannedFile from its object in the plan's JSON (see `_as_object`)."""
    values = tuple(content["values"])  # JSON has lists in place of tuples
    arguments = {**content, "values": values}
    return PlannedFile(**arguments)


#: Fields of Plan that `to_text` writes in another form, or not at all.
_WRITTEN_OTHERWISE = ("spec", "shards", "input_folder")


def work_shares(rows: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return each shard's share of all rows plus its share of all bytes, in billionths.

    The bytes count too, because longer rows take longer.
    rows, sizes: each shard's number of rows and of bytes.
    """
    all_rows = max(1, sum(rows))
    all_bytes = max(1, sum(sizes))
    shares = []
    for num_rows, num_bytes in zip(rows, sizes, strict=True):
        share = num_rows / all_rows + num_bytes / all_bytes
        shares.append(round(10**9 * share))
    return shares


#: Near a run's end, each shard holds the remaining rows divided by this number. So workers end at nearly the same time.
TAIL_SHARDS = 8
#: The fewest rows of a shard near a run's end. This many keep a worker's batch filled.
MIN_TAIL_ROWS = 128


def cut_shards(
    row_groups: Sequence[Sequence[int]], rows_per_shard: int, limit: int | None = None
) -> tuple[Shard, ...]:
    """Cut files into shards of at most `rows_per_shard` rows, each within one file, in row order.

    In a run of more than TAIL_SHARDS shards, the last shards are smaller. A run without rows gets one empty shard. Its
    part shows readers the schema.
    row_groups: for each file, the number of rows in each row group. limit: only the first `limit` rows are taken.
    Raises InvalidJob for more than MAX_SHARDS shards.
    """
    rows = sum(map(sum, row_groups))
    if limit is not None:
        rows = min(rows, limit)

    # If rows_per_shard is far too small, this estimate shows it before millions of shards are made.
    are_too_many = rows // rows_per_shard > MAX_SHARDS
    shards: list[Shard] = []
    if not are_too_many:
        shards = list(_cut(row_groups, rows_per_shard, rows))
        are_too_many = len(shards) > MAX_SHARDS
    if are_too_many:
        raise InvalidJob(
            f"{rows} rows in {len(row_groups)} files make more than {MAX_SHARDS} shards of at most "
            f"{rows_per_shard} rows: give a larger rows_per_shard, or make several runs of it"
        )
    if not shards:
        shards = [Shard(file=0, start=0, rows=0, first_group=0, num_groups=0, skip=0)]
    return tuple(shards)


def _cut(row_groups: Sequence[Sequence[int]], max_rows: int, num_rows: int) -> Iterator[Shard]:
    """Yield shards of at most `max_rows` rows. Together they hold the files' first `num_rows` rows."""
    # In a short run, all shards have `max_rows` rows. In a long run, the last shards are smaller.
    min_rows = max_rows
    is_long = num_rows > TAIL_SHARDS * max_rows
    if is_long:
        tail_rows = max(max_rows // TAIL_SHARDS, MIN_TAIL_ROWS)
        min_rows = min(tail_rows, max_rows)
    num_left = num_rows
    for file, groups in enumerate(row_groups):
        ends = list(accumulate(groups))  # ends[i]: the index of the row after row group i
        num_rows_of_file = sum(groups)
        start = 0
        while num_left and start < num_rows_of_file:
            wanted_rows = max(min_rows, num_left // TAIL_SHARDS)
            rows = min(wanted_rows, max_rows, num_rows_of_file - start, num_left)
            yield _shard(file, ends, start, rows)
            start += rows
            num_left -= rows


def _shard(file: int, ends: Sequence[int], start: int, rows: int) -> Shard:
    """Return the shard of one range of rows. ends: for each row group, the index of the row after its last row."""
    first_group = bisect_right(ends, start)  # the group that holds row `start`
    range_end = start + rows
    last_group = bisect_left(ends, range_end)  # the group that holds the last row
    group_start = ends[first_group - 1] if first_group > 0 else 0
    return Shard(
        file=file,
        start=start,
        rows=rows,
        first_group=first_group,
        num_groups=last_group - first_group + 1,
        skip=start - group_start,
    )
