"""The journal of an open shard: its answers, and how far its other rows are, for whoever takes it up next.

A file of answers for each interval of an execution, with those of that interval; and one that tells how far the rows
are that were under way in the last one. They lie in a folder that planning makes and the run's end removes: who thaws
afterwards finds none.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.common.keys import FORMAT
from jobs.context.answers import Answer
from jobs.context.served_model import ServedModel
from jobs.errors import RunError
from jobs.items.records import Progress
from jobs.items.runner import Answered, ItemRunner, PromptTokens
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import Keys
from jobs.parquet.outputs.part import embedding_size
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.reuse.taken_answers import (
    KEY_FIELD,
    NO_KEY,
    answers_table,
    check_key,
    read_answers,
)
from jobs.parquet.tables.table_reading import TableReading
from jobs.runs.plans.names import KEY, ROW, TOKENS
from sandbox.exhausted import is_exhausted

_UNDER_WAY = "_under_way"
_WHOSE = b"whose"
_log = logging.getLogger("rq.worker")


@dataclass
class Journalled:
    """What a journal holds: the answers of rows, the tokens generated for them, and how far others are."""

    answers: dict[int, Answer] = field(default_factory=dict)
    num_tokens: int = 0
    under_way: dict[int, Progress] = field(default_factory=dict)


class ShardJournal:
    """The journal of one shard, as one execution reads and goes on with it."""

    def __init__(
        self, folder: RunFolder, shard: int, model: ServedModel, asked: str, keys: Keys
    ) -> None:
        """asked: RowKeys.name. keys: of the rows, by which other runs find them."""
        plan = folder.plan
        self._storage, self._folder, self._prefix = folder.storage, folder.journal, f"_{shard:05d}."
        self._whose = f"{FORMAT} {plan.run} {shard} {plan.seed} {model.pin} {asked}".encode()
        self._fields = kind_of(plan.spec).fields(plan.spec, embedding_size(plan.spec, model))
        self._execution_id, self._num_files, self._num_written, self._now = (
            folder.execution_id,
            0,
            0,
            "",
        )
        self._keys, self._names = keys, set[str]()
        self._writing, self._is_closed = threading.Lock(), False

    def read(self) -> Journalled:
        """Return what earlier executions have left; passes over what is damaged, or of another plan or model."""
        found = Journalled()
        self._names = {
            name for name in self._storage.names(self._folder) if name.startswith(self._prefix)
        }
        for name in sorted(self._names):
            path = os.path.join(self._folder, name)
            try:
                with closing(TableReading(self._storage, path)) as file:
                    self._add(found, path, file)
            except (
                RunError,
                OSError,
                ValueError,
                TypeError,
                KeyError,
                RecursionError,
            ) as error:  # it only saves time
                if is_exhausted(error):
                    raise
                _log.warning("the journal %s is passed over: %s", path, error)
        for row in found.answers:
            found.under_way.pop(row, None)
        return found

    def _add(self, found: Journalled, path: str, file: TableReading) -> None:
        if (file.schema.metadata or {}).get(_WHOSE) != self._whose:
            _log.warning(
                "the journal %s is passed over: it is of another plan, check or model", path
            )
        elif _UNDER_WAY in file.schema.names:
            for row, text, key in (
                each.values() for batch in file.batches for each in batch.to_pylist()
            ):
                check_key(path, self._keys, row, key)
                was, known = Progress.from_json(json.loads(text)), found.under_way.get(row)
                if known is None or was.length > known.length:
                    found.under_way[row] = was
        else:
            for (row, num_tokens, key), answer in read_answers(file, (ROW, TOKENS, KEY)):
                check_key(path, self._keys, row, key)
                found.num_tokens += 0 if row in found.answers else num_tokens
                found.answers[row] = answer

    def keep(self, runner: ItemRunner[Answer], so_far: PromptTokens) -> Callable[[], None] | None:
        """Return what writes down, in any thread, what is new; see OpenTask."""
        answered = runner.answered[self._num_written :]
        under_way = runner.under_way(so_far)
        if not answered and not under_way:
            return None

        def write() -> None:
            with self._writing, suppress(FileNotFoundError):  # the run has ended
                if not self._is_closed:
                    self._write(answered, under_way)

        return write

    def _write(
        self, answered: Sequence[Answered[Answer]], under_way: Mapping[int, Progress]
    ) -> None:
        """Write answers first: a row whose answer is there is not under way, whatever else is told of it."""
        if answered:
            own = [pa.field(ROW, pa.int64()), pa.field(TOKENS, pa.int64()), KEY_FIELD]
            beside = []
            for row in answered:
                key = NO_KEY if row.answer.error else self._keys[row.place].tobytes()
                beside.append((row.place, row.num_tokens, key))
            self._put(
                "answers",
                answers_table(own, beside, [row.answer for row in answered], self._fields),
            )
            self._num_written += len(answered)
        if under_way:
            texts = [json.dumps(each.to_json()) for each in under_way.values()]
            its_keys = [self._keys[row].tobytes() for row in under_way]
            now = pa.table({ROW: list(under_way), _UNDER_WAY: texts, KEY: its_keys})
            before, self._now = self._now, self._put("now", now)
            if before:
                self._storage.remove(os.path.join(self._folder, before))

    def _put(self, what: str, table: pa.Table) -> str:
        name = f"{self._prefix}{self._execution_id}.{what}.{self._num_files}"
        with self._storage.open_output(os.path.join(self._folder, name)) as sink:
            pq.write_table(
                table.replace_schema_metadata({_WHOSE: self._whose}), sink, write_page_checksum=True
            )
        self._num_files += 1
        self._names.add(name)
        return name

    def remove(self) -> None:
        """Remove what was read and written, once the part is there; the run's end removes what is left."""
        with self._writing, suppress(OSError, RunError):
            self._is_closed = True
            for name in self._names:
                self._storage.remove(os.path.join(self._folder, name))
