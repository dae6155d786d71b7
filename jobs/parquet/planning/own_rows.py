"""Chooses the rows that a run asks, and takes answers of earlier runs.

A run may ask only new rows, or ask rows in another order. Planning writes the chosen rows beside the plan. From then on
the run knows only these rows, as the rows of its first file. Planning also writes the numbers that these rows have in
the input, so that a failed row can be found there.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.context import JobContext
from jobs.context.adapters import Adapters
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.chain import Chain
from jobs.parquet.asks.generate import Generate
from jobs.parquet.asks.kinds import ask_of, kind_of
from jobs.parquet.asks.row_keys import Keys, RowKeys, differences, model_mark, row_keys, whole_keys
from jobs.parquet.files.storage import Storage, writing
from jobs.parquet.outputs.part import embedding_size
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.prompts.sources import row_source
from jobs.parquet.reuse.answer_log import answer_records
from jobs.parquet.reuse.old_runs import OldPart, OldRuns, Places
from jobs.parquet.reuse.taken_answers import write_taken
from jobs.parquet.shards.shard_texts import rendered_shards, shard_batches, shard_readers
from jobs.parquet.tables.columns import ROW_NUMBER, RowProblem
from jobs.parquet.tables.row_groups import RowBuckets, write_groups
from jobs.prompts.generated import DEFAULT_MAX_TOKENS
from jobs.runs.plans.names import row_numbers_name
from jobs.runs.plans.plan import Plan, Reused, cut_shards
from jobs.runs.redis_state.submission import Submission

FINISH_REASON = "finish_reason"
ATTEMPTS = "attempts"
#: Finish reasons of answers that were not cut. Also 1, for a single attempt: a further attempt may follow a cut answer.
_UNCUT = {"stop", "tool_calls", 1}


def with_own_rows(context: JobContext, storage: Storage, plan: Plan, chosen: Places) -> Plan:
    """Write some rows of the input as the run's rows; return the plan that asks them. Raises InputError, OutputError.

    chosen: the rows' numbers in the input, in the run's order.
    """
    assert plan.reused is not None, "the files' names contain the name of `plan.reused`"
    # The chosen rows count as rows of the first file.
    first_file, *other_files = plan.files
    file_with_rows = replace(first_file, num_chosen=len(chosen))
    files_without_rows = [replace(file, num_chosen=0) for file in other_files]
    new_plan = replace(plan, files=(file_with_rows, *files_without_rows))
    group_rows: list[int] = []  # the number of rows of each row group
    if len(chosen):
        rows_path = new_plan.rows_path(file_with_rows)
        numbers_path = os.path.join(plan.spec.output, row_numbers_name(plan.reused.name))
        for path in (rows_path, numbers_path):
            storage.make_folder(os.path.dirname(path))
        with writing(rows_path), storage.open_output(rows_path) as sink:
            batches = _chosen_rows(context, storage, plan, chosen)
            group_rows = write_groups(sink, schema=None, batches=batches)
        with writing(numbers_path), storage.open_output(numbers_path) as sink:
            sink.write(chosen.astype("<i8").tobytes())
    shards = cut_shards([group_rows], plan.spec.rows_per_shard)
    return replace(new_plan, shards=shards, sizes=())  # the sizes of the new shards are unknown


def _chosen_rows(
    context: JobContext, storage: Storage, plan: Plan, chosen: Places
) -> Iterator[pa.RecordBatch]:
    """Yield the rows whose numbers are in `chosen`, in the order of `chosen`. Reads only the shards of these rows."""
    # places[row]: the index of the row's number in `chosen`; -1 for a row that was not chosen
    places = np.full(plan.rows, -1, np.int64)
    places[chosen] = np.arange(len(chosen))
    first_rows = [plan.first_row(shard) for shard in range(len(plan.shards))]
    shards_of_chosen = np.searchsorted(first_rows, chosen, "right") - 1
    shards = np.unique(shards_of_chosen).tolist()
    with RowBuckets(len(chosen)) as buckets:
        for shard, reader in shard_readers(storage, plan, shards):
            start = first_rows[shard]
            for batch in shard_batches(context, plan, plan.shards[shard], reader):
                end = start + batch.num_rows
                numbers = np.arange(start, end)
                start = end
                if plan.spec.order is not None:
                    # This column lets a reader put the output back into the input's order.
                    batch = batch.append_column(ROW_NUMBER, pa.array(numbers))
                places_of_batch = places[numbers]
                is_chosen = places_of_batch >= 0
                buckets.add(places_of_batch[is_chosen], batch.filter(pa.array(is_chosen)))
        for table in buckets.sorted():
            storage.check_interrupted()
            yield from table.to_batches()


#: Rows are grouped by the first 64 characters of their prompts. Within a group, rows are grouped by the first 256, and
#: so on.
BEGINNINGS = (64, 256, 1024, 4096, 16384)


def in_order(context: JobContext, storage: Storage, plan: Plan) -> Plan:
    """Write the rows in the order that `spec.order` names, and return a plan whose rows have this order.

    Without `spec.order`, return the plan as it is.
    """
    spec = plan.spec
    if spec.order is None:
        return plan
    keys = np.empty((plan.rows, 1 + len(BEGINNINGS)), np.uint64)  # keys[row]: see _order_key
    source = row_source(spec, context.check_sampling, context.model.control_tokens)
    for start, rows in rendered_shards(context, storage, plan, source):
        for number, row in enumerate(rows, start):
            keys[number] = _order_key(row)
    # Rows are sorted by the first column, then by the second one, and so on. `lexsort` takes the columns in reverse.
    columns_from_last = keys.T[::-1]
    order = np.lexsort(columns_from_last)
    plan = replace(plan, reused=Reused(context.execution_id))
    return with_own_rows(context, storage, plan, order)


def _order_key(row: Row | RowProblem) -> list[int]:
    """Return the numbers by which a row is sorted.

    The first number stands for the row's own max_tokens: large limits come first. Only the number of bits of max_tokens
    counts. So rows with about the same limit are sorted by their prompts. The other numbers are hashes of the prompt's
    beginnings, so that rows with a common beginning become neighbours.
    """
    if isinstance(row, RowProblem):
        return [0] * (1 + len(BEGINNINGS))
    max_tokens = row.own_sampling.get("max_tokens")
    num_bits = max_tokens.bit_length() if isinstance(max_tokens, int) else 0
    # The first number is at least 1. So rows with a problem, which have 0, come first.
    key = [64 - min(num_bits, 63)]
    for length in BEGINNINGS:
        beginning = row.prompt[:length].encode("utf-8", "surrogatepass")
        digest = blake2b(beginning, digest_size=8).digest()
        key.append(int.from_bytes(digest, "little"))
    return key


def with_reused(context: JobContext, storage: Storage, plan: Plan, submission: Submission) -> Plan:
    """Take the answers of the earlier runs that a submission names; return a plan that records these runs.

    The plan's seed is that of the first earlier run, unless the new run's arguments have a seed. Raises CannotReuse,
    InputError or OutputError.
    """
    if not submission.reuse:
        return plan
    num_rows = plan.rows
    any_model = submission.reuse_from_any_model
    old = OldRuns(storage, submission.reuse, plan)
    plan = replace(plan, reused=Reused(context.execution_id))
    plan = with_seed_of(plan, old)
    ask = ask_of(plan, context)
    look_up = partial(find_matches, context, storage, plan, ask, old, any_model)
    matches = look_up()
    num_dimensions = embedding_size(plan.spec, context.model)
    fields = kind_of(plan.spec).fields(plan.spec, num_dimensions)
    if plan.spec.only_new:
        new_rows = _new_rows(old, matches, look_up, fields)
        plan = with_own_rows(context, storage, plan, new_rows)
    else:
        _write_taken_answers(storage, plan, ask.keys.name, old, matches, look_up, fields)

    # A row whose old answer was cut is asked again on purpose, so it counts as found.
    num_cut = np.count_nonzero(matches.is_cut & (matches.places < 0))
    num_found = sum(run.rows for run in old.reused) + num_cut
    # Only old rows with an answer have known keys. A row that failed has no key.
    most_to_find = min(num_rows, old.keys.num_known)
    if 2 * num_found < most_to_find:  # the user may have changed an argument by mistake
        _note_differences(old, plan, any_model)

    assert plan.reused is not None
    runs = tuple(map(asdict, old.reused))
    reused = replace(plan.reused, any_model=any_model, runs=runs)
    return replace(plan, reused=reused)


def _note_differences(old: OldRuns, plan: Plan, any_model: bool) -> None:
    """Note in `old.reused` what each earlier run asked differently.

    any_model: True if answers of any model are taken, so that another model is no difference.
    """
    has_function = plan.spec.repairs.function is not None
    why_few_answers = _WHY_FEW_CHECKED_ANSWERS if has_function else _WHY_FEW_ANSWERS
    for run, old_plan in zip(old.reused, old.plans, strict=True):
        run.differs = differences(old_plan, plan, any_model=any_model)
        if not run.differs:
            # No argument differs. If few answers are taken, the reason is another one.
            run.differs = [why_few_answers]


def _new_rows(
    old: OldRuns, matches: "Matches", look_up: Callable[[], "Matches"], fields: Sequence[pa.Field]
) -> Places:
    """Return the numbers of the rows that no earlier run has answered.

    look_up: finds matches again; see take_answers. fields: the answers' columns.
    """
    needed_fields = [field for field in fields if field.name == "error" or _shows_cuts(field.name)]
    # The loop uses no answer. It reads all of them, so that a row whose answer has an error or cannot be read gets -1
    # in `matches.places`.
    for _ in take_answers(old, matches, look_up, pa.schema(needed_fields)):
        pass
    return np.flatnonzero(matches.places < 0)


def _write_taken_answers(
    storage: Storage,
    plan: Plan,
    ask_name: str,
    old: OldRuns,
    matches: "Matches",
    look_up: Callable[[], "Matches"],
    fields: Sequence[pa.Field],
) -> None:
    """Write the answers of earlier runs beside the plan, for each shard.

    ask_name: a hash of what the run asks; see RowKeys.name. look_up: finds matches again; see take_answers. fields: the
    answers' columns.
    """
    with RowBuckets(plan.rows) as buckets:
        for rows, batch, sources in take_answers(old, matches, look_up, pa.schema(fields)):
            model_hashes = matches.model_hashes[matches.models[rows]]
            records = answer_records(rows, matches.keys[rows], model_hashes, sources, batch)
            buckets.add(rows, records)
        write_taken(storage, plan, ask_name, buckets)


#: What a user reads if few rows were taken from an earlier run that asked the same.
_WHY_FEW_ANSWERS = "it asked the same, but of other rows, or it has few answers"
#: What the user reads if a function checks the answers.
_WHY_FEW_CHECKED_ANSWERS = (
    "it asked the same, but of other rows, or with another source of the check function, "
    "or it has few answers"
)


def with_seed_of(plan: Plan, old: OldRuns) -> Plan:
    """Return the plan with the seed of the first earlier run, unless the new run's arguments have a seed."""
    if not old.plans or "seed" in plan.spec.sampling:
        return plan
    first_plan = old.plans[0]
    reused = plan.reused or Reused("")  # a dry run writes nothing, so it needs no name
    # `given_seed` is None if the first run drew its seed at random. Keys cover only a given seed.
    reused = replace(reused, seed=first_plan.given_seed)
    return replace(plan, seed=first_plan.seed, reused=reused)


def remove_reused(storage: Storage, plan: Plan, plan_in_place: Plan) -> None:
    """Remove the files of a plan that is not used: another planner put its plan in place first.

    These files hold the answers taken from earlier runs, and the chosen rows with their numbers.
    """
    if plan.reused is None:
        return
    if plan_in_place.reused is not None and plan_in_place.reused.name == plan.reused.name:
        return  # the plan in place is this one: it was written, but the storage's reply was lost
    paths = [plan.reused_path(shard) for shard in range(len(plan.shards))]
    first_file = plan.files[0]
    if first_file.num_chosen:  # with_own_rows has written the chosen rows
        paths += [
            plan.rows_path(first_file),
            os.path.join(plan.spec.output, row_numbers_name(plan.reused.name)),
        ]
    with writing(plan.spec.output):
        for path in paths:
            storage.remove(path)


@dataclass
class Matches:
    """For each new row, the old row whose answer it may take.

    All arrays but `model_hashes` have one value for each new row.
    places: the old row, as an index among all old rows; -1 if the new row has no old row.
    models: the model that answered the old row, as an index in `model_hashes`.
    model_hashes: hashes of the models whose answers may be taken.
    keys: a hash of what the new row asks and of the model that answered the old row.
    had_smaller_limit: whether the old row had a smaller max_tokens.
    is_cut: whether an answer with a smaller max_tokens was found and not taken, because it was cut.
    """

    places: Places
    models: npt.NDArray[np.uint16]
    model_hashes: Keys
    keys: Keys
    had_smaller_limit: npt.NDArray[np.bool_]
    is_cut: npt.NDArray[np.bool_]

    @classmethod
    def unmatched(cls, num_rows: int, model_hashes: Keys) -> Self:
        """Return a Matches in which no new row has an old row yet."""
        return cls(
            places=np.full(num_rows, -1, np.int64),
            models=np.zeros(num_rows, np.uint16),
            model_hashes=model_hashes,
            keys=np.zeros((num_rows, 2), np.uint64),
            had_smaller_limit=np.zeros(num_rows, np.bool_),
            is_cut=np.zeros(num_rows, np.bool_),
        )

    def view(self, start: int, end: int) -> Self:
        """Return a view of the new rows from `start` up to `end`. Changes of the view change this object."""
        return replace(
            self,
            places=self.places[start:end],
            models=self.models[start:end],
            keys=self.keys[start:end],
            had_smaller_limit=self.had_smaller_limit[start:end],
            is_cut=self.is_cut[start:end],
        )

    def match_again(self, rows: Places, other: "Matches") -> None:
        """Give some new rows the old rows that `other` has found for them. rows: the numbers of these new rows."""
        self.places[rows] = other.places[rows]
        self.models[rows] = other.models[rows]
        self.keys[rows] = other.keys[rows]
        self.had_smaller_limit[rows] = other.had_smaller_limit[rows]


def find_matches(
    context: JobContext, storage: Storage, plan: Plan, ask: RowAsk, old: OldRuns, any_model: bool
) -> Matches:
    """Look for each row of a plan in the old runs. The plan's inputs must be readable.

    In a cascade, the answers of the second model are preferred to the answers of the first model. any_model: whether to
    take answers of any other model, if there are no answers of the run's models.
    """
    # Hashes of the models whose answers may be taken. Models that come earlier are preferred.
    model_hashes = model_mark(plan.model)
    second_answers = None
    if plan.second is not None:
        model_hashes = np.concatenate([model_mark(plan.second), model_hashes])
        second_answers = _SecondAnswers(plan, old)
    if any_model:
        model_hashes = np.concatenate([model_hashes, old.model_hashes])
    matches = Matches.unmatched(plan.rows, model_hashes)
    functions_version = plan.spec.functions_version(context.checks)
    row_keys_with_limits = _keys_with_smaller_limit(plan, old, functions_version)
    for start, rows in rendered_shards(context, storage, plan, ask.source):
        end = start + len(rows)
        matches_of_shard = matches.view(start, end)
        keys = row_keys(ask.key_of, rows)
        _match_equal(matches_of_shard, keys, old, second_answers)
        _match_smaller_limit(matches_of_shard, keys, rows, old, row_keys_with_limits)
        matches_of_shard.keys[:] = whole_keys(keys, model_hashes[matches_of_shard.models])
    return matches


class _SecondAnswers:
    """Tells which answers of a cascade's second model a plan may take: see _escalates_as_many."""

    def __init__(self, plan: Plan, old: OldRuns) -> None:
        self._first_places = [part.first for part in old.parts]
        is_usable = [_escalates_as_many(plan, part.plan) for part in old.parts]
        # One value for each old part, and a last value for the part number -1, which stands for no old row.
        self._is_usable = np.array([*is_usable, False])

    def usable(self, places: Places) -> Places:
        """Return `places`, with -1 for each row whose answer may not be taken. places: indices among all old rows."""
        # part_numbers[i]: the number of the old part that holds places[i]; -1 for a place of -1. The index -1 leads to
        # the last value of `_is_usable`, which is False.
        part_numbers = np.searchsorted(self._first_places, places, "right") - 1
        return np.where(self._is_usable[part_numbers], places, -1)


def _match_equal(
    matches: Matches, keys: Keys, old: OldRuns, second_answers: _SecondAnswers | None
) -> None:
    """Look for old rows that asked the same as the new rows.

    keys: the new rows' keys, which do not cover the model. second_answers: None unless the run is a cascade. In a
    cascade, `matches.model_hashes` has the second model first.
    """
    has_key = keys.any(axis=1)
    for model_number, model_hash in enumerate(matches.model_hashes):
        unmatched = np.flatnonzero(has_key & (matches.places < 0))
        old_places = old.keys.find(whole_keys(keys[unmatched], model_hash))
        if second_answers is not None and model_number == 0:
            old_places = second_answers.usable(old_places)
        matches.places[unmatched] = old_places
        matches.models[unmatched] = model_number


def _match_smaller_limit(
    matches: Matches,
    keys: Keys,
    rows: Sequence[Row | RowProblem],
    old: OldRuns,
    row_keys_with_limits: Sequence[RowKeys],
) -> None:
    """Look for old rows that asked the same as the new rows, but with a smaller max_tokens.

    keys: the new rows' keys, which do not cover the model. row_keys_with_limits: for each smaller max_tokens, a RowKeys
    that makes the keys which the new rows would have with that max_tokens.
    """
    has_key = keys.any(axis=1)
    for keys_with_limit in row_keys_with_limits:
        for model_number, model_hash in enumerate(matches.model_hashes):
            unmatched = np.flatnonzero(has_key & (matches.places < 0))
            unmatched_rows = [rows[index] for index in unmatched.tolist()]
            new_keys = row_keys(keys_with_limit.key_of, unmatched_rows)
            old_places = old.keys.find(whole_keys(new_keys, model_hash))
            matches.places[unmatched] = old_places
            matches.models[unmatched] = model_number
            matches.had_smaller_limit[unmatched] = old_places >= 0


def _keys_with_smaller_limit(plan: Plan, old: OldRuns, functions_version: str) -> list[RowKeys]:
    """Return a RowKeys for each max_tokens that old runs had and that is smaller than the plan's.

    Such a RowKeys makes the keys that the plan's rows would have with that max_tokens. An old answer under one of these
    keys would be the same now, unless it was cut. A run of batch files gets no such RowKeys, because its lines have
    sampling values of their own. functions_version: see RunSpec.functions_version.
    """
    spec = plan.spec
    has_limit = kind_of(spec) in (Generate, Chain)
    takes_several_requests = spec.way is not None  # each answer is made with several requests
    if not has_limit or takes_several_requests or plan.second is not None:
        return []
    limit = spec.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    row_keys_with_limits = []
    # None stands for a run that was given no limit.
    given_limits = {old_plan.spec.sampling.get("max_tokens") for old_plan in old.plans}
    for given_limit in given_limits:
        old_limit = DEFAULT_MAX_TOKENS if given_limit is None else given_limit
        are_integers = type(limit) is int and type(old_limit) is int
        if not are_integers or old_limit >= limit:
            continue
        sampling = {name: value for name, value in spec.sampling.items() if name != "max_tokens"}
        if given_limit is not None:  # keys cover only sampling values that a run was given
            sampling["max_tokens"] = given_limit
        spec_with_limit = replace(spec, sampling=sampling)
        keys_with_limit = RowKeys(
            spec_with_limit,
            opening_request=None,
            functions_version=functions_version,
            max_model_len=plan.model.max_model_len,
            seed=plan.given_seed,
            adapters=Adapters(plan.model.adapters),
        )
        row_keys_with_limits.append(keys_with_limit)
    return row_keys_with_limits


def _shows_cuts(column: str) -> bool:
    """Whether a column shows that an answer was cut, or that a row was asked again because its answer was cut."""
    return column == ATTEMPTS or column.endswith(FINISH_REASON)


def _has_stopped(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return for each row whether all its answers ended by themselves, each at the first attempt."""
    has_stopped = np.ones(batch.num_rows, np.bool_)
    for name in filter(_shows_cuts, batch.schema.names):
        for row, value in enumerate(batch.column(name).to_pylist()):
            values = value if isinstance(value, list) else [value]  # several samples give a list
            may_be_cut = not _UNCUT.issuperset(values)
            if may_be_cut:
                has_stopped[row] = False
    return has_stopped


def _escalates_as_many(plan: Plan, old: Plan) -> bool:
    """Whether both plans have the same models, and `plan` escalates every row that `old` has escalated."""
    if _identities(plan) != _identities(old):
        return False
    # A row is escalated if its margin is below the bound: the second model is asked about it.
    old_bound = old.spec.escalate_below or 0
    bound = plan.spec.escalate_below or 0
    return old_bound <= bound


def _identities(plan: Plan) -> list[object]:
    """Return what identifies a plan's models."""
    second_identity = None if plan.second is None else plan.second.identity
    return [plan.model.identity, second_identity]


def take_answers(
    old: OldRuns, matches: Matches, look_up: Callable[[], Matches], schema: pa.Schema
) -> Iterator[tuple[Places, pa.RecordBatch, list[str]]]:
    """Yield batches of new rows: the rows' numbers, their answers as columns of `schema`, and the old rows' names.

    If the answer of an old row cannot be read or taken, that old row is forgotten, and another one is looked up in all
    old runs. At the end, each new row without an answer has -1 in `matches.places`. look_up: finds matches among the
    old rows that are not forgotten.
    """
    is_taken = np.zeros(len(matches.places), bool)
    # In each round, a new row tries one old row. With a round for each old run, it can try an old row of each run.
    num_rounds = len(old.reused)
    for round_number in range(1, num_rounds + 1):
        # rows: the new rows whose old row was found and whose answer is not taken yet, in the order of the old rows
        rows = np.flatnonzero((matches.places >= 0) & ~is_taken)
        rows = rows[np.argsort(matches.places[rows], kind="stable")]
        for part, indices, batch in old.answers(matches.places[rows], schema):
            answered_rows = rows[indices]
            is_usable = _are_usable(matches, answered_rows, batch)
            taken_rows = answered_rows[is_usable]
            if not is_usable.all():
                cut_rows = answered_rows[~is_usable]
                matches.is_cut[cut_rows] = True
                batch = batch.filter(pa.array(is_usable))
            is_taken[taken_rows] = True
            part.reused.rows += len(taken_rows)
            yield taken_rows, batch, _sources(part, matches.places[taken_rows])

        untaken_rows = rows[~is_taken[rows]]
        old.keys.forget(matches.places[untaken_rows])
        matches.places[untaken_rows] = -1
        if not len(untaken_rows) or round_number == num_rounds:
            return
        matches.match_again(untaken_rows, look_up())


def _are_usable(matches: Matches, rows: Places, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return for each new row whether its old answer, in `batch`, would be the same with the new max_tokens."""
    had_smaller_limit = matches.had_smaller_limit[rows]
    if not had_smaller_limit.any():
        return np.ones(len(rows), np.bool_)
    return ~had_smaller_limit | _has_stopped(batch)


def _sources(part: OldPart, places: Places) -> list[str]:
    """Return the names of old rows of a part: the old run's output and the row's number in the old run."""
    # A place counts from the first row of all old parts. A row number counts from the first row of one old run.
    row_numbers = places - part.first + part.plan.first_row(part.shard)
    return [f"{part.reused.output}#{number}" for number in row_numbers]
