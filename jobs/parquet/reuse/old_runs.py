"""Reads earlier runs whose answers a new run takes: the keys of their rows, and their answers part by part.

Each part has a file of keys. All its numbers are little-endian. The file has, in this order:
- a digest of the run, the shard and all that follows
- the number of models that answered, in 64 bits
- hashes of these models (`model_mark` of jobs.parquet.asks.row_keys)
- for each row, a key: a hash of what the row asked and of the model that answered it

A shard without a part may have logs of answers (answer_log.py). The records of a log have such keys too.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.errors import (
    AnswersDamaged,
    CannotReuse,
    InputNotFound,
    PartDamaged,
    PathSwapped,
    PlanDamaged,
    PlanOfAnotherVersion,
    RunError,
)
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import NO_KEYS, SIZE, Keys, as_keys
from jobs.parquet.files.storage import Storage, reading
from jobs.parquet.outputs.part import read_part_stats
from jobs.parquet.outputs.run_folder import load_plan
from jobs.parquet.reuse.answer_log import UNREADABLE, hashes_in, open_log, rows_in
from jobs.parquet.tables.columns import ColumnChoice
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import (
    JOURNAL,
    KEY,
    KEYS,
    MODEL,
    OPENAI_BATCH,
    PLAN,
    ROW,
    SUCCESS,
    UNDER_WAY,
    keys_name,
    part_shards,
)
from jobs.runs.plans.plan import Plan
from jobs.runs.plans.spec import RunSpec

#: The most models that may have answered a part's rows.
MAX_MODELS = 64
#: The most models whose answers a new run takes. All old parts together may have more.
MAX_MODELS_OF_OLD_RUNS = 64

_DIGEST_BYTES = 16
_COUNT_BYTES = 8


def write_keys(
    storage: Storage, plan: Plan, shard: int, keys: Keys, model_hashes: Keys, execution_id: str
) -> None:
    """Write the file of a part's keys, unless the file exists.

    keys: for each row, a hash of what it asked and of the model that answered; zeros for a row without an answer.
    model_hashes: for each row, a hash of the model that answered it.
    """
    distinct_hashes = np.unique(model_hashes, axis=0)
    packed_count = len(distinct_hashes).to_bytes(_COUNT_BYTES, "little")
    body = packed_count + distinct_hashes.tobytes() + keys.tobytes()
    content = _digest(plan.run, shard, body) + body
    path = os.path.join(plan.spec.output, keys_name(shard))
    storage.make_folder(os.path.dirname(path))
    storage.put(path, execution_id, lambda sink: sink.write(content))


def read_keys(storage: Storage, plan: Plan, shard: int, run: str) -> tuple[Keys, Keys]:
    """Return the keys of a part's rows, and hashes of the models that answered. Raises PartDamaged.

    A key is a hash of what a row asked and of the model that answered it. run: the id of the run that wrote the keys.
    If the folder was copied, this is not the id in the plan.
    """
    path = os.path.join(plan.spec.output, keys_name(shard))
    num_rows = plan.shards[shard].rows
    most_bytes = _DIGEST_BYTES + _COUNT_BYTES + (MAX_MODELS + num_rows) * SIZE
    try:
        with reading(path), storage.open_input(path) as source:
            content = bytes(source.read(most_bytes))
    except (InputNotFound, PathSwapped):
        raise PartDamaged(path, "there is no such file") from None

    digest = content[:_DIGEST_BYTES]
    body = content[_DIGEST_BYTES:]
    is_as_written = digest == _digest(run, shard, body)
    # After the count come the hashes of the models and the keys, of SIZE bytes each.
    has_possible_length = len(body) % SIZE == _COUNT_BYTES
    if not is_as_written or not has_possible_length:
        raise PartDamaged(path, "its digest does not fit its contents")
    num_hashes = int.from_bytes(body[:_COUNT_BYTES], "little")
    hashes_and_keys = as_keys(body[_COUNT_BYTES:])
    if len(hashes_and_keys) != num_hashes + num_rows:
        raise PartDamaged(
            path,
            f"it has the keys of {len(hashes_and_keys) - num_hashes} rows, expected {num_rows}",
        )
    model_hashes = hashes_and_keys[:num_hashes]
    keys = hashes_and_keys[num_hashes:]
    return keys, model_hashes


def _digest(run: str, shard: int, body: bytes) -> bytes:
    """Return a hash of a file of keys, by which a damaged file is noticed."""
    key = f"{run} {shard}".encode()
    return blake2b(body, digest_size=_DIGEST_BYTES, key=key, person=b"tokenmill keys").digest()


#: The most equal known keys that `find` returns in turn. `find` never returns further keys that are equal to these.
MAX_EQUAL = 1000

Places = npt.NDArray[np.int64]
"""Numbers of rows or keys in an order that the context names, from 0."""


class KnownKeys:
    """An index of known keys. It takes at most 32 bytes for each known key.

    all: a key for each row of the old runs. A row without an answer has a key of zeros, which is never found.
    num_known: how many keys can be found.
    """

    def __init__(self, keys: Keys) -> None:
        self.all = keys
        is_key = keys.any(axis=1)  # a key of zeros belongs to a row without an answer
        self.num_known = int(np.count_nonzero(is_key))
        self._second_halves = keys[:, 1]
        #: The indices of the keys in `all`, in the order of the keys' first halves.
        self._order = np.argsort(keys[:, 0], kind="stable").astype(np.uint32)
        self._first_halves = keys[self._order, 0]  # ascending
        #: How often each group of equal keys was found. The count is at the index of the group's first key.
        self._times_found = np.zeros(len(keys), np.uint32)

    def forget(self, places: Places) -> None:
        """Make the known keys at these indices unknown."""
        self._second_halves[places] = 0  # no key that is looked up has a second half of zeros

    def find(self, keys: Keys) -> Places:
        """Return the index of each key among the known keys; -1 for an unknown key.

        Equal known keys are found in turn, so that rows that ask the same get different answers.
        """
        # self._order[lows[i]:highs[i]]: the indices of the known keys that have the same first half as keys[i]
        first_halves = np.ascontiguousarray(keys[:, 0])
        second_halves = keys[:, 1]
        lows = np.searchsorted(self._first_halves, first_halves, "left")
        highs = np.searchsorted(self._first_halves, first_halves, "right")
        num_candidates = highs - lows
        is_key = keys.any(axis=1)  # a key of zeros belongs to a row that asks nothing
        found_places = np.full(len(keys), -1, np.int64)

        # Nearly all keys have one candidate or none. These keys are found without a loop.
        has_one = (num_candidates == 1) & is_key
        only_candidates = self._order[lows[has_one]].astype(np.int64)
        is_equal = self._second_halves[only_candidates] == second_halves[has_one]
        found_places[has_one] = np.where(is_equal, only_candidates, -1)

        for row in np.flatnonzero((num_candidates > 1) & is_key):
            end = min(highs[row], lows[row] + MAX_EQUAL)
            candidates = self._order[lows[row] : end]
            is_equal = self._second_halves[candidates] == second_halves[row]
            equal_places = candidates[is_equal]
            if len(equal_places):
                found_places[row] = self._next_in_turn(equal_places)
        return found_places

    def _next_in_turn(self, equal_places: npt.NDArray[np.uint32]) -> int:
        """Return the index of one of several equal keys. Each call returns the next of `equal_places`, in turn."""
        first_place = equal_places[0]
        turn = self._times_found[first_place] % len(equal_places)
        self._times_found[first_place] += 1
        return int(equal_places[turn])


#: The most files of an earlier run that are listed as passed over.
MAX_LISTED = 10
#: The names of logs with answers, in journals or of a cascade's first model. `shard` is the shard's number.
_ANSWERS = re.compile(r"_(?:kept\.)?(?P<shard>\d{5,9})\.(?:.*\.)?answers\b", re.ASCII)


@dataclass
class ReusedRun:
    """What a new run has taken from an old one.

    output: the old run's folder. run: its id. rows: how many rows got an answer from the old run. passed_over: files
    that could not be read, and why. differs: what the old run asked differently; empty if the new run has taken at
    least half of the answers that it could take.
    """

    output: str
    run: str
    rows: int = 0
    passed_over: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def pass_over(self, path: str, reason: str) -> None:
        """Note a file or folder that is not used, and why. At most MAX_LISTED are noted."""
        if len(self.passed_over) < MAX_LISTED:
            self.passed_over.append(f"{path}: {reason}")

    def pass_over_unreadable(self, error: RunError) -> None:
        """Note a file that could not be read. error: has a `path`, and a `reason` unless the file is gone."""
        self.pass_over(error.argument("path"), error.argument("reason", default="it is gone"))


@dataclass(frozen=True)
class OldPart:
    """The answers of one shard of an old run.

    first: the index of the shard's first row among all old rows. reused: what the new run has taken from this old run.
    logs: the paths of the shard's logs of answers; empty if the shard has a part.
    """

    plan: Plan
    shard: int
    first: int
    reused: ReusedRun
    logs: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the shard."""
        return self.plan.shards[self.shard].rows


Batches = Iterator[tuple[Places, pa.RecordBatch]]
"""Batches of a file. Each batch comes with the numbers that its rows have in their shard."""

Opened = tuple[pa.Schema, Batches]
"""The schema of a whole file, and its batches with only the chosen columns."""


class OldRuns:
    """The earlier runs that a submission names. Answers that these runs get later are not seen.

    reused: what the new run takes from each run. plans: each run's plan. parts: the shards with answers, of all runs.
    keys: an index of the rows of all parts, which are called old rows. model_hashes: hashes of the models that
    answered these rows.
    """

    def __init__(self, storage: Storage, outputs: Sequence[str], new: Plan) -> None:
        """Read the runs' keys. Raises PathOutsideRoots, or CannotReuse for a folder without answers.

        outputs: the folders of the earlier runs. new: the plan of the new run.
        """
        self._storage = storage
        self._new = new
        self.reused: list[ReusedRun] = []
        self.parts: list[OldPart] = []
        self.plans: list[Plan] = []
        for output in dict.fromkeys(map(storage.resolve, outputs)):
            self._add_run(output)

        num_rows = sum(part.num_rows for part in self.parts)
        keys = np.zeros((num_rows, 2), np.uint64)
        # Arrays of hashes of the models that answered. `np.concatenate` needs at least one array.
        hash_arrays = [NO_KEYS]
        for part in self.parts:
            storage.check_interrupted()
            # `part_keys` is a view of `keys`, so writing into it fills `keys`.
            part_keys = keys[part.first : part.first + part.num_rows]
            try:
                if part.logs:
                    hash_arrays += self._read_logs(part, part_keys)
                else:
                    run = part.reused.run
                    known_keys, known_hashes = read_keys(storage, part.plan, part.shard, run)
                    part_keys[:] = known_keys
                    hash_arrays.append(known_hashes)
            except PartDamaged as error:
                part.reused.pass_over_unreadable(error)
        self.keys = KnownKeys(keys)
        distinct_hashes = np.unique(np.concatenate(hash_arrays), axis=0)
        self.model_hashes = distinct_hashes[:MAX_MODELS_OF_OLD_RUNS]

    def _add_run(self, output: str) -> None:
        """Add the run of a folder, and its shards that have answers. Raises CannotReuse."""
        storage = self._storage
        try:
            written_plan = load_plan(storage, os.path.join(output, PLAN))
        except PlanDamaged as error:
            reason = error.argument("reason")
            raise CannotReuse(output, f"{error.argument('path')}: {reason}") from None
        except PlanOfAnotherVersion as error:
            age = error.argument("age")
            raise CannotReuse(output, f"{age} version of Tokenmill has planned it") from None

        reused = ReusedRun(output, written_plan.run)
        # The folder may have been moved since the plan was written.
        spec = replace(written_plan.spec, output=output)
        plan = replace(written_plan, spec=spec)
        self.plans.append(plan)
        self.reused.append(reused)
        logs_by_shard = _logs_by_shard(storage, plan)  # its keys are the shards that have answers
        if storage.stat(os.path.join(output, SUCCESS)) is not None:
            all_shards = set(range(len(plan.shards)))
            for shard in all_shards - logs_by_shard.keys():
                reused.pass_over(plan.part_path(shard), "it is gone")
        reason = _reason_to_take_none(plan, self._new)
        if reason is not None:
            reused.pass_over(output, reason)
            return

        first = 0
        if self.parts:
            last_part = self.parts[-1]
            first = last_part.first + last_part.num_rows
        for shard, logs in sorted(logs_by_shard.items()):
            part = OldPart(plan, shard, first, reused, tuple(logs))
            self.parts.append(part)
            first += part.num_rows

    def _read_logs(self, part: OldPart, keys: Keys) -> list[Keys]:
        """Read the keys of a shard's answers from its logs; return hashes of the models that answered.

        keys: the array into which the key of each answered row is written. A damaged log is passed over.
        """
        columns = ColumnChoice((ROW, KEY, MODEL, UNDER_WAY, "error"))
        model_hashes = []
        for path in part.logs:
            try:
                with open_log(self._storage, path, columns) as (file, _):
                    for rows, answer_keys, batch in _answers_in_log(path, file, part.num_rows):
                        is_good = np.asarray(batch.column("error").is_null())
                        good_rows = rows[is_good]
                        keys[good_rows] = answer_keys[is_good]
                        hashes_of_batch = hashes_in(batch.column(MODEL))
                        model_hashes.append(np.unique(hashes_of_batch, axis=0))
            except AnswersDamaged as error:
                part.reused.pass_over_unreadable(error)
        return model_hashes

    def answers(
        self, places: Places, schema: pa.Schema
    ) -> Iterator[tuple[OldPart, Places, pa.RecordBatch]]:
        """Yield the answers of the wanted old rows, part by part.

        places: the ascending indices of the wanted rows among all old rows. schema: the columns of a new run's answers.
        Yields the part, the indices in `places` of the rows with an answer, and the answers. Rows with an error are
        left out. Files that are damaged or lack a column are passed over.
        """
        for part in self.parts:
            # places[begin:end]: the wanted rows that are in this part
            begin, end = np.searchsorted(places, [part.first, part.first + part.num_rows])
            if begin == end:
                continue
            wanted = places[begin:end] - part.first  # the numbers of these rows within the shard
            is_missing = np.ones(len(wanted), bool)
            paths = part.logs or [part.plan.part_path(part.shard)]
            for path in paths:
                try:
                    for indices, batch in self._answers_in_file(part, path, wanted, schema):
                        is_new = is_missing[indices]  # several logs may have a row's answer
                        is_missing[indices] = False
                        yield part, begin + indices[is_new], batch.filter(pa.array(is_new))
                except (*UNREADABLE, AnswersDamaged, PartDamaged) as error:
                    part.reused.pass_over_unreadable(error)

    def _answers_in_file(
        self, part: OldPart, path: str, wanted: Places, schema: pa.Schema
    ) -> Iterator[tuple[Places, pa.RecordBatch]]:
        """Yield a file's answers to wanted rows: indices into `wanted`, and the answers.

        wanted: rows of the shard, ascending. Raises PartDamaged, AnswersDamaged, or one of UNREADABLE.
        """
        prefix = ""  # a log names its columns without the run's prefix
        if not part.logs:  # the file is the shard's part
            prefix = part.plan.spec.output_prefix
            # Raises PartDamaged unless the part has as many rows as its file of keys.
            read_part_stats(self._storage, part.plan, part.shard, part.reused.run)
        answer_schema = pa.schema([field.with_name(f"{prefix}{field.name}") for field in schema])
        cut_columns: list[str] = []
        if _max_lengths(part.plan) != _max_lengths(self._new):
            # An answer that the old max_model_len has cut may be longer now, so it is left out.
            cut_columns = [f"{prefix}{name}" for name in _columns_of_cuts(part.plan.spec)]

        names = (*answer_schema.names, *cut_columns)
        open_file = self._opened_log if part.logs else self._opened_part
        with open_file(part, path, names) as (file_schema, batches):
            _check_fields(path, file_schema, answer_schema)
            for rows, batch in batches:
                self._storage.check_interrupted()
                # wanted[first:end]: the wanted rows that may be in this batch
                first, end = _wanted_range(wanted, rows, part.num_rows)
                # For each wanted row that is in the batch: its index in the batch, and its index in wanted[first:end].
                indices_in_batch, indices_in_range = _indices_of(wanted[first:end], rows)
                wanted_rows = batch.take(pa.array(indices_in_batch))
                is_good = np.asarray(wanted_rows.column(f"{prefix}error").is_null())
                for name in cut_columns:
                    is_good &= _is_uncut(wanted_rows.column(name))
                values = wanted_rows.select(answer_schema.names).columns
                answers = pa.RecordBatch.from_arrays(values, schema=schema)  # without the prefix
                yield first + indices_in_range[is_good], answers.filter(pa.array(is_good))

    @contextmanager
    def _opened_log(self, part: OldPart, path: str, names: Sequence[str]) -> Iterator[Opened]:
        """Lend the answers of a log, but only those whose keys are in `self.keys`. Raises AnswersDamaged.

        A row may have answers of both models of a cascade, in two logs. `self.keys` has the key of only one answer.
        """
        # The keys of the part's rows.
        part_keys = self.keys.all[part.first : part.first + part.num_rows]

        def known_answers(file: TableReading) -> Batches:
            """Yield the log's answers. An answer is left out if its key is not the key of its row in `self.keys`."""
            for rows, answer_keys, batch in _answers_in_log(path, file, part.num_rows):
                is_known = (part_keys[rows] == answer_keys).all(axis=1)
                yield rows[is_known], batch.filter(pa.array(is_known))

        columns = ColumnChoice((ROW, KEY, UNDER_WAY, *names))
        with open_log(self._storage, path, columns) as (file, _):
            yield file.schema, known_answers(file)

    @contextmanager
    def _opened_part(self, part: OldPart, path: str, names: Sequence[str]) -> Iterator[Opened]:
        """Lend the rows of a part."""
        with closing(TableReading(self._storage, path, ColumnChoice(names))) as file:
            yield file.schema, _numbered(file)


def _answers_in_log(
    path: str, file: TableReading, num_rows: int
) -> Iterator[tuple[Places, Keys, pa.RecordBatch]]:
    """Yield the rows, the keys and the answers of a log, batch by batch.

    A key is a hash of what a row asked and of the model that answered it. num_rows: how many rows the shard has.
    """
    for batch in file.batches:
        answers = batch.filter(batch.column(UNDER_WAY).is_null())
        yield rows_in(path, answers, num_rows), hashes_in(answers.column(KEY)), answers


def _numbered(file: TableReading) -> Batches:
    """Yield the batches of a part, with the numbers that their rows have in the part."""
    start = 0
    for batch in file.batches:
        end = start + batch.num_rows
        yield np.arange(start, end), batch
        start = end


def _check_fields(path: str, schema: pa.Schema, wanted: pa.Schema) -> None:
    """Raise PartDamaged if a file lacks a column, or has it with another type."""
    for column in wanted:
        index = schema.get_field_index(column.name)  # -1 if there is no such column
        if index < 0 or schema.field(index).type != column.type:
            raise PartDamaged(path, f"it has no column {column.name!r} of {column.type}")


def _wanted_range(wanted: Places, rows: Places, num_rows: int) -> tuple[int, int]:
    """Return the range of `wanted` that can be in a batch: its first index and its end.

    rows: the row numbers of the batch. num_rows: how many rows the shard has.
    """
    # A batch without rows gives an empty range.
    lowest = rows.min(initial=num_rows)
    highest = rows.max(initial=-1)
    first, end = np.searchsorted(wanted, [lowest, highest + 1])
    return int(first), int(end)


def _indices_of(wanted: Places, rows: Places) -> tuple[Places, Places]:
    """Find wanted row numbers in `rows`. Return the index in `rows` and the index in `wanted` of each number found.

    A wanted row that is not in `rows` is left out, so that no row gets the answer of another row.
    """
    order = np.argsort(rows, kind="stable")
    # nearest[i]: the index in `rows` of wanted[i], or of the next higher row. There always is such a row, because no
    # wanted row is higher than the highest of `rows`.
    nearest = order[np.searchsorted(rows, wanted, sorter=order)]
    found = np.flatnonzero(rows[nearest] == wanted)  # indices in `wanted`
    return nearest[found], found


def _max_lengths(plan: Plan) -> set[int]:
    """Return the max_model_len of each of a plan's models."""
    return {model.max_model_len for model in (plan.model, plan.second) if model is not None}


def _reason_to_take_none(old: Plan, new: Plan) -> str | None:
    """Return why no answer of an old run can be taken; None if answers can be taken.

    The only such reason is that the model takes sequences of another length now.
    """
    if _max_lengths(old) == _max_lengths(new):
        return None
    longest_old = max(_max_lengths(old))
    shortest_new = min(_max_lengths(new))
    if longest_old > shortest_new:
        return (
            f"its answers have up to {longest_old} tokens, and the model takes {shortest_new} now"
        )
    if old.spec.prompts:
        return (
            "its rows have several prompts, and its smaller max_model_len may have cut some answers"
        )
    return None


def _columns_of_cuts(spec: RunSpec) -> tuple[str, ...]:
    """Return a run's columns that show which answers were cut."""
    fields = kind_of(spec).fields(spec, embedding_size=0)
    names = [field.name for field in fields]
    possible_names = ["finish_reason"]
    if spec.input_format == OPENAI_BATCH:
        # The completion is a response with choices, each of which may be cut.
        possible_names = ["completion", "finish_reason"]
    return tuple(name for name in possible_names if name in names)


#: A finish reason in a response's JSON. No text in the JSON can match, because quotation marks in texts are escaped.
_CUT_CHOICE = '"finish_reason": "length"'


def _is_uncut(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return for each row whether none of its answers was cut. column: finish reasons, lists of these, or responses."""
    return np.array([not _is_cut(value) for value in column.to_pylist()], bool)


def _is_cut(value: str | list[str] | None) -> bool:
    """Whether an answer ended at its limit of tokens. value: its finish reason or reasons, or its response's JSON."""
    if value is None:
        return False
    if isinstance(value, list):
        return "length" in value
    return value == "length" or _CUT_CHOICE in value


def _logs_by_shard(storage: Storage, plan: Plan) -> dict[int, list[str]]:
    """Return the paths of the logs of each shard that has answers.

    If a shard has a part, its list is empty, because the part has its answers. A shard that the plan lacks is left out.
    Raises CannotReuse for parts without keys.
    """
    logs_by_shard: dict[int, list[str]] = {}
    folder = os.path.join(plan.spec.output, JOURNAL)
    for name in storage.names(folder):
        match = _ANSWERS.match(name)
        if match is not None:
            shard = int(match["shard"])
            logs_by_shard.setdefault(shard, []).append(os.path.join(folder, name))

    shards = part_shards(storage.names(plan.spec.parts_folder))
    if shards and not storage.names(os.path.join(plan.spec.output, KEYS)):
        raise CannotReuse(plan.spec.output, f"it has parts, and no {KEYS}/ to find their rows by")
    for shard in shards:
        logs_by_shard[shard] = []
    return {shard: paths for shard, paths in logs_by_shard.items() if shard < len(plan.shards)}
