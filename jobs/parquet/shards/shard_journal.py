"""The journal of an open shard: its answers, and how far its other rows are, for whoever takes it up next.

A file of answers for each interval of an execution, with those of that interval; and one that tells how far the rows
are that were under way in the last one. They lie, beside the answers that planning has taken from earlier runs, in a
folder that planning makes and the run's end removes: who thaws afterwards finds none.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.context.answers import Answer
from jobs.context.served_model import ServedModel
from jobs.context.under_way import UnderWay
from jobs.errors import RunError
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import Keys, model_mark
from jobs.parquet.files.filesystem import StoreError
from jobs.parquet.outputs.part import embedding_size
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.reuse.taken_answers import ROW, WHOSE, answers_table, read_answers, whose
from jobs.parquet.shards.shard_requests import ShardRequests
from jobs.parquet.tables.table_reading import TableReading

#: What stands beside a row that is under way, as JSON.
_UNDER_WAY = "_under_way"

_log = logging.getLogger("rq.worker")


class ShardJournal:
    """The journal of one shard, as one execution reads and goes on with it.

    answers: of rows, when it was read. num_tokens: generated for them. under_way: how far other rows were.
    """

    def __init__(self, folder: RunFolder, shard: int, model: ServedModel, asked: str, keys: Keys) -> None:
        """asked: RowKeys.name. keys: of the rows, without a model."""
        plan = folder.plan
        self._storage, self._folder, self._prefix = folder.storage, folder.journal, f"_{shard:05d}."
        self._whose, self._mark = whose(plan, shard, model.fingerprint, asked), model_mark(model.fingerprint).tobytes()
        self._fields = kind_of(plan.spec).fields(plan.spec, embedding_size(plan.spec, model))
        self._execution_id, self._num_files, self._num_written, self._now = folder.execution_id, 0, 0, ""
        self._keys, self._names = keys, set[str]()
        self._writing, self._is_closed = threading.Lock(), False
        self.answers: dict[int, Answer] = {}
        self.under_way: dict[int, UnderWay] = {}
        self.num_tokens = 0
        self._read()

    def _read(self) -> None:
        """Take what earlier executions have left; pass over what is damaged, or of another plan or model."""
        with suppress(FileNotFoundError):
            self._names = {name for name in self._storage.names(self._folder) if name.startswith(self._prefix)}
        for name in sorted(self._names):
            path = os.path.join(self._folder, name)
            try:
                with closing(TableReading(self._storage, path)) as file:
                    self._add(path, file)
            except StoreError:  # where another try may go better
                raise
            except (RunError, OSError, ValueError, TypeError, KeyError) as error:  # it only saves time
                _log.warning("the journal %s is passed over: %s", path, error)
        for row in self.answers:
            self.under_way.pop(row, None)

    def _add(self, path: str, file: TableReading) -> None:
        if (file.schema.metadata or {}).get(WHOSE) != self._whose:
            _log.warning("the journal %s is passed over: it is of another plan, check or model", path)
        elif _UNDER_WAY in file.schema.names:
            for row, text in (each.values() for batch in file.batches for each in batch.to_pylist()):
                was, known = UnderWay.from_json(json.loads(text)), self.under_way.get(row)
                if known is None or was.length > known.length:
                    self.under_way[row] = was
        else:
            for row, num_tokens, answer in read_answers(file, self._mark):
                self.num_tokens += 0 if row in self.answers else num_tokens
                self.answers[row] = answer

    def keep(
        self, requests: ShardRequests, so_far: Mapping[int, Mapping[int, Sequence[int]]]
    ) -> Callable[[], None] | None:
        """Return what writes down, in any thread, what is new; see OpenTask."""
        answered, under_way = requests.answered[self._num_written :], requests.under_way(so_far)
        if not answered and not under_way:
            return None

        def write() -> None:
            with self._writing, suppress(FileNotFoundError):  # the run has ended
                if not self._is_closed:
                    self._write(answered, under_way)

        return write

    def _write(self, answered: Sequence[tuple[int, int, Answer]], under_way: Mapping[int, UnderWay]) -> None:
        """Write answers first: a row whose answer is there is not under way, whatever else is told of it."""
        if answered:
            self._put("answers", answers_table(answered, self._keys, self._mark, self._fields))
            self._num_written += len(answered)
        if under_way:
            texts = [json.dumps(each.to_json()) for each in under_way.values()]
            before, self._now = self._now, self._put("now", pa.table({ROW: list(under_way), _UNDER_WAY: texts}))
            if before:
                self._storage.remove(os.path.join(self._folder, before))

    def _put(self, what: str, table: pa.Table) -> str:
        name = f"{self._prefix}{self._execution_id}.{what}.{self._num_files}"
        with self._storage.open_output(os.path.join(self._folder, name)) as sink:
            pq.write_table(table.replace_schema_metadata({WHOSE: self._whose}), sink)
        self._num_files += 1
        self._names.add(name)
        return name

    def remove(self) -> None:
        """Remove what was read and written, once the part is there; the run's end removes what is left."""
        with self._writing, suppress(OSError, RunError):
            self._is_closed = True
            for name in self._names:
                self._storage.remove(os.path.join(self._folder, name))
