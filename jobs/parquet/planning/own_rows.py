"""A run's own rows, where it does not ask its input's as they come: new ones alone, or sorted ones.

Planning writes them beside the plan; from there on the run knows these alone, as rows of its first file. Which rows of
the input they are lies beside the keys, for whoever is told of a row that failed. Of earlier runs it takes answers.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import product

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.context import JobContext
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.generate import Chain, Generate
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.asks.row_keys import Keys, RowKeys, differences, model_mark, row_keys
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.outputs.part import embedding_size
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.old_runs import OldRuns, Places
from jobs.parquet.reuse.taken_answers import BESIDE, write_taken
from jobs.parquet.shards.shard_texts import rendered_shards, shard_batches, shard_readers
from jobs.parquet.tables.columns import ROW_NUMBER, RowProblem
from jobs.parquet.tables.row_groups import RowBuckets, write_groups
from jobs.runs.plans.names import kept_name
from jobs.runs.plans.plan import Plan, Reused, cut_shards
from jobs.runs.redis_state.submission import Submission

FINISH_REASON, ATTEMPTS = "finish_reason", "attempts"
#: Values of these columns that tell that no answer was cut: reasons, and a single attempt.
_UNCUT = {"stop", "tool_calls", 1}


def with_own_rows(context: JobContext, storage: Storage, plan: Plan, chosen: Places) -> Plan:
    """Write rows of the input, whose numbers are `chosen`; return the plan of these. Raises InputError, OutputError."""
    assert plan.reused is not None
    before, name = plan, kept_name(plan.reused.name)
    first, *others = plan.files
    first = replace(first, kept=len(chosen))
    plan = replace(plan, files=(first, *(replace(file, kept=0) for file in others)))
    groups = list[int]()
    if len(chosen):
        target, places = plan.rows_path(first), os.path.join(plan.spec.output, name)
        for path in (target, places):
            storage.make_folder(os.path.dirname(path))
        with writing(target), storage.open_output(target) as sink:
            groups = write_groups(sink, None, _chosen_rows(context, storage, before, chosen))
        with writing(places), storage.open_output(places) as sink:
            sink.write(chosen.astype("<i8").tobytes())
    return replace(plan, shards=cut_shards([groups], plan.spec.rows_per_shard), sizes=())


def _chosen_rows(context: JobContext, storage: Storage, plan: Plan, chosen: Places) -> Iterator[pa.RecordBatch]:
    """Yield rows of the input in the order of their numbers in `chosen`; shards that have none of them are not read."""
    places = np.full(plan.rows, -1, np.int64)
    places[chosen] = np.arange(len(chosen))
    firsts = [plan.first_row(shard) for shard in range(len(plan.shards))]
    shards = np.unique(np.searchsorted(firsts, chosen, "right") - 1).tolist()
    with RowBuckets(len(chosen)) as buckets:
        for number, reader in shard_readers(storage, plan, shards):
            start = firsts[number]
            for batch in shard_batches(context, plan, plan.shards[number], reader):
                numbers = np.arange(start, start := start + batch.num_rows)
                if plan.spec.order is not None:
                    batch = batch.append_column(ROW_NUMBER, pa.array(numbers))
                is_chosen = places[numbers] >= 0
                buckets.add(places[numbers[is_chosen]], batch.filter(pa.array(is_chosen)))
        for table in buckets.sorted():
            storage.check_interrupted()
            yield from table.to_batches()


#: Rows whose prompts are alike in so many characters come together; and of these, those that are alike in more.
BEGINNINGS = (64, 256, 1024, 4096, 16384)


def in_order(context: JobContext, storage: Storage, plan: Plan) -> Plan:
    """Write a run's rows in the order that it asks for, where it does; return the plan of these."""
    spec = plan.spec
    if spec.order is None:
        return plan
    keys = np.empty((plan.rows, 1 + len(BEGINNINGS)), np.uint64)
    source = row_source(spec, context.check_sampling, context.model.control_tokens)
    for start, rows in rendered_shards(context, storage, plan, source):
        for number, row in enumerate(rows, start):
            keys[number] = _key(row)
    order = np.lexsort(keys.T[::-1])
    return with_own_rows(context, storage, replace(plan, reused=Reused(context.execution_id)), order)


def _key(row: Row | RowProblem) -> list[int]:
    if isinstance(row, RowProblem):
        return [0] * (1 + len(BEGINNINGS))
    longest = row.own_sampling.get("max_tokens")
    size = longest.bit_length() if isinstance(longest, int) else 0
    found = (blake2b(row.prompt[:length].encode("utf-8", "surrogatepass"), digest_size=8) for length in BEGINNINGS)
    return [64 - min(size, 63), *(int.from_bytes(each.digest(), "little") for each in found)]


def with_reused(context: JobContext, storage: Storage, plan: Plan, submission: Submission) -> Plan:
    """Take what the runs that a submission names have answered; return the plan that says so.

    Its seed is the first one's, unless its arguments have one. Raises CannotReuse, InputError or OutputError.
    """
    spec = plan.spec
    if not submission.reuse:
        return plan
    old, num_rows = OldRuns(storage, submission.reuse, plan), plan.rows
    plan = with_seed_of(replace(plan, reused=Reused(context.execution_id)), old)
    ask = ask_of(plan, context)
    look_up = partial(match, context, storage, plan, ask, old, submission.reuse_from_any_model)
    matches = look_up()
    if spec.only_new:
        all_fields = kind_of(spec).fields(spec, embedding_size(spec, context.model))
        needed = pa.schema([each for each in all_fields if each.name == "error" or _tells_cuts(each.name)])
        for _ in answers(old, matches, look_up, needed):
            pass  # it leaves of matches those that have no error, and can be read
        fresh = np.flatnonzero(matches.places < 0)
        plan = with_own_rows(context, storage, plan, fresh)
    else:
        fields = kind_of(spec).fields(spec, embedding_size(spec, context.model))
        beside_answers = pa.schema([*BESIDE, *fields])
        with RowBuckets(plan.rows) as taken:
            for rows, batch, sources in answers(old, matches, look_up, pa.schema(fields)):
                marks = [matches.marks[number].tobytes() for number in matches.models[rows]]
                keys = [each.tobytes() for each in matches.keys[rows]]
                values = zip((rows, marks, sources, keys), BESIDE, strict=True)
                beside = [pa.array(each, field.type) for each, field in values]
                taken.add(rows, pa.RecordBatch.from_arrays([*beside, *batch.columns], schema=beside_answers))
            write_taken(storage, plan, taken)
    if 2 * sum(told.rows for told in old.told) < num_rows:
        for told, each in zip(old.told, old.plans, strict=True):
            told.differs = differences(each, plan, any_model=submission.reuse_from_any_model) or [
                _NO_DIFFERENCE[bool(plan.spec.repairs.function)]
            ]
    assert plan.reused is not None
    runs = tuple(map(asdict, old.told))
    told_of = replace(plan.reused, asked=ask.keys.name, any_model=submission.reuse_from_any_model, runs=runs)
    return replace(plan, reused=told_of)


#: Said if few rows were taken from an earlier run, though it asked the same; by whether a function checks them.
_NO_DIFFERENCE = {
    False: "it asked the same, of other rows or with few answers",
    True: "it asked the same, of other rows, with few answers, or with another source of the check function",
}


def with_seed_of(plan: Plan, old: OldRuns) -> Plan:
    """Return the plan with the first earlier run's seed, unless the new run was given one."""
    if not old.plans or "seed" in plan.spec.sampling:
        return plan
    first = old.plans[0]
    reused = plan.reused or Reused("")
    return replace(plan, seed=first.seed, reused=replace(reused, seed=first.given_seed))


def remove_reused(storage: Storage, plan: Plan, first: Plan) -> None:
    """Remove what was written for a plan where `first` is in its place. The two are one if a reply was lost."""
    if plan.reused is None or (first.reused is not None and first.reused.name == plan.reused.name):
        return
    paths = list(map(plan.reused_path, range(len(plan.shards))))
    if plan.files[0].kept:
        paths += [plan.rows_path(plan.files[0]), os.path.join(plan.spec.output, kept_name(plan.reused.name))]
    with writing(plan.spec.output):
        for path in paths:
            storage.remove(path)


@dataclass
class Matches:
    """The old rows whose answers a new run may take.

    places: for each new row the place of its old row, -1 for none. models: for each new row, which of `marks` (models)
    answered the old one. keys: the rows' keys with that model. is_shorter: whether max_tokens was smaller then.
    """

    places: Places
    models: npt.NDArray[np.uint16]
    marks: Keys
    keys: Keys
    is_shorter: npt.NDArray[np.bool_]


def match(context: JobContext, storage: Storage, plan: Plan, ask: RowAsk, old: OldRuns, any_model: bool) -> Matches:
    """Look up each row of a plan, whose inputs can be read. The answers of a cascade's second model come first."""
    marks = model_mark(plan.model)
    if plan.second is not None:
        marks = np.concatenate([model_mark(plan.second), marks])
        firsts = [part.first for part in old.parts]
        fits = np.array([*(_asks_second_too(plan, part.plan) for part in old.parts), False])
    if any_model:
        marks = np.concatenate([marks, old.marks])  # its own answers first
    found = Matches(
        np.full(plan.rows, -1, np.int64),
        np.zeros(plan.rows, np.uint16),
        marks,
        np.zeros((plan.rows, 2), np.uint64),
        np.zeros(plan.rows, np.bool_),
    )
    shorter = _shorter_asks(plan, old, plan.spec.functions_version(context.checks))
    for start, rows in rendered_shards(context, storage, plan, ask.source):
        places, models = found.places[start : start + len(rows)], found.models[start : start + len(rows)]
        keys = row_keys(ask.key_of, rows)
        asked: npt.NDArray[np.bool_] = np.any(keys, axis=1)
        for number, mark in enumerate(marks):
            missing = np.flatnonzero(asked & (places < 0))
            there = old.keys.find(keys[missing] ^ mark)
            if plan.second is not None and not number:
                there[~fits[np.searchsorted(firsts, there, "right") - 1]] = -1
            places[missing] = there
            models[missing] = number
        for row_keys_of, (number, mark) in product(shorter, enumerate(marks)):
            missing = np.flatnonzero(asked & (places < 0))
            keys_there = row_keys(row_keys_of.of, [rows[row] for row in missing])
            places[missing] = old.keys.find(keys_there ^ mark)
            models[missing] = number
            found.is_shorter[start + missing] = places[missing] >= 0
        found.keys[start : start + len(rows)] = keys ^ marks[models]
    return found


#: The engine's limit for a request without max_tokens.
DEFAULT_MAX_TOKENS = 256


def _shorter_asks(plan: Plan, old: OldRuns, check: str) -> list[RowKeys]:
    """Return keys of old runs that differ by a smaller max_tokens alone. Answers that ended by themselves are the same.

    check: the version of the check's function. Empty for batch files, whose lines have values of their own.
    """
    spec = plan.spec
    if kind_of(spec) not in (Generate, Chain) or spec.way is not None or plan.second is not None:
        return []
    limit = spec.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    given = {each.spec.sampling.get("max_tokens") for each in old.plans}
    found = []
    for theirs in given:
        their_limit = DEFAULT_MAX_TOKENS if theirs is None else theirs
        if type(limit) is not int or type(their_limit) is not int or their_limit >= limit:
            continue
        sampling = {name: value for name, value in spec.sampling.items() if name != "max_tokens"}
        if theirs is not None:
            sampling["max_tokens"] = theirs
        found.append(RowKeys(replace(spec, sampling=sampling), None, check, plan.model.max_model_len, plan.given_seed))
    return found


def _tells_cuts(column: str) -> bool:
    """Whether a column of answers tells if one was cut, or if it was asked again because of that."""
    return column == ATTEMPTS or column.endswith(FINISH_REASON)


def _has_stopped(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return for each row whether all of its answers ended by themselves, each at its first attempt."""
    has_stopped = np.ones(batch.num_rows, np.bool_)
    for name in filter(_tells_cuts, batch.schema.names):
        values = batch.column(name).to_pylist()
        has_stopped &= [set(each if isinstance(each, list) else [each]) <= _UNCUT for each in values]
    return has_stopped


def _asks_second_too(plan: Plan, old: Plan) -> bool:
    """Whether a plan asks its second model about each row that an old plan asked it about."""
    one, other = ([each.model.identity, each.second and each.second.identity] for each in (plan, old))
    return one == other and (old.spec.escalate_below or 0) <= (plan.spec.escalate_below or 0)


def answers(
    old: OldRuns, matches: Matches, look_up: Callable[[], Matches], schema: pa.Schema
) -> Iterator[tuple[Places, pa.RecordBatch, list[str]]]:
    """Yield new rows, their answers by the names of `schema`, and which old rows; damaged ones are looked up again."""
    is_taken = np.zeros(len(matches.places), bool)
    for run in old.told:
        rows = np.flatnonzero((matches.places >= 0) & ~is_taken)
        rows = rows[np.argsort(matches.places[rows], kind="stable")]
        for part, which, batch in old.answers(matches.places[rows], schema):
            is_shorter = matches.is_shorter[rows[which]]
            if is_shorter.any():
                is_whole = ~is_shorter | _has_stopped(batch)
                which, batch = which[is_whole], batch.filter(pa.array(is_whole))
            is_taken[rows[which]] = True
            part.told.rows += len(which)
            first = part.plan.first_row(part.shard) - part.first
            yield rows[which], batch, [f"{part.told.output}#{place + first}" for place in matches.places[rows[which]]]
        lost = rows[~is_taken[rows]]
        old.keys.forget(matches.places[lost])
        matches.places[lost] = -1
        if not len(lost) or run is old.told[-1]:
            return
        again = look_up()
        matches.places[lost], matches.models[lost] = again.places[lost], again.models[lost]
        matches.keys[lost], matches.is_shorter[lost] = again.keys[lost], again.is_shorter[lost]
