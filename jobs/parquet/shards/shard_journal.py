"""The journal of an open shard. It has the rows' answers and progress so far, for the shard's next execution.

The journal is a few logs (jobs/parquet/reuse/answer_log.py). An execution makes an entry every few seconds. Each entry
adds a log with the answers since the last entry. Each entry also writes the progress of the rows under way into a new
log, and removes the execution's earlier log of progress. Planning makes the folder of the logs, and the run's end
removes the folder. So an execution that is frozen until after the run's end finds no folder, and leaves no logs behind.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from jobs.context.answers import Answer
from jobs.errors import RunError
from jobs.items.records import Progress
from jobs.items.runner import ItemRunner, PromptTokens
from jobs.items.under_way import Answered
from jobs.parquet.outputs.run_folder import RunFolder
from jobs.parquet.reuse.answer_log import AnswerLog, Record

#: The kinds of logs, as the logs' names say: with answers, and with the progress of rows under way.
_ANSWERS = "answers"
_PROGRESS = "now"


@dataclass
class Journalled:
    """What earlier executions of a shard's job have recorded.

    answers: the records of answered rows, by row. under_way: the progress of other rows, by row. num_tokens: how many
    tokens were generated for the answers.
    """

    answers: dict[int, Record] = field(default_factory=dict)
    under_way: dict[int, Progress] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, record: Record) -> None:
        """Add a record. If a row has several, an answer is kept, or else the record with the most progress."""
        row = record.row
        if record.progress is None:
            if row not in self.answers:
                self.num_tokens += record.num_tokens
            self.answers[row] = record
            self.under_way.pop(row, None)
        elif row not in self.answers:
            known_progress = self.under_way.get(row)
            if known_progress is None or record.progress.sort_key > known_progress.sort_key:
                self.under_way[row] = record.progress


class ShardJournal:
    """The journal of one shard. An execution reads what earlier executions have written, then adds entries."""

    def __init__(self, folder: RunFolder, shard: int, log: AnswerLog, model_hash: bytes) -> None:
        """model_hash: a hash of the model that this execution asks. Records of a cascade's other model are left out."""
        self._storage = folder.storage
        self._folder = folder.journal
        self._execution_id = folder.execution_id
        self._prefix = f"_{shard:05d}."
        self._log = log
        self._model_hash = model_hash
        #: The names of all logs that this journal has read or written.
        self._names: set[str] = set()
        #: The name of this execution's last log of rows under way.
        self._progress_name: str | None = None
        self._num_files = 0
        #: How many of the runner's answers are in logs.
        self._num_written = 0
        self._is_closed = False
        self._writing = threading.Lock()

    def read(self) -> Journalled:
        """Return what earlier executions have recorded. Logs that are damaged or of another plan are passed over."""
        journalled = Journalled()
        names = self._storage.names(self._folder)
        self._names = {name for name in names if name.startswith(self._prefix)}
        for name in sorted(self._names):
            path = os.path.join(self._folder, name)
            for record in self._log.read_if_whole(self._storage, path):
                if record.model_hash == self._model_hash:
                    journalled.add(record)
        return journalled

    def keep(self, runner: ItemRunner[Answer], tokens: PromptTokens) -> Callable[[], None] | None:
        """Return a function that writes an entry, and that any thread may call; None if there is nothing to write."""
        answered = runner.answered[self._num_written :]
        under_way = runner.under_way(tokens)
        if not answered and not under_way:
            return None

        def write() -> None:
            """Write the entry, unless the journal is removed."""
            # The folder is gone once the run has ended.
            with self._writing, suppress(FileNotFoundError):
                if not self._is_closed:
                    self._write(answered, under_way)

        return write

    def _write(
        self, answered: Sequence[Answered[Answer]], under_way: Mapping[int, Progress]
    ) -> None:
        """Write an entry. Answers are written first, because a row with an answer never counts as under way."""
        if answered:
            records = []
            for answered_row in answered:
                record = Record(
                    answered_row.place,
                    self._model_hash,
                    answered_row.answer,
                    answered_row.num_tokens,
                )
                records.append(record)
            self._put(_ANSWERS, records)
            self._num_written += len(answered)
        if under_way:
            records = []
            for place, progress in under_way.items():
                records.append(Record(place, self._model_hash, progress=progress))
            earlier_name = self._progress_name
            self._progress_name = self._put(_PROGRESS, records)
            if earlier_name is not None:
                self._storage.remove(os.path.join(self._folder, earlier_name))

    def _put(self, kind: str, records: Sequence[Record]) -> str:
        """Write records into a new log; return the log's name. kind: _ANSWERS or _PROGRESS."""
        name = f"{self._prefix}{self._execution_id}.{kind}.{self._num_files}"
        with self._storage.open_output(os.path.join(self._folder, name)) as sink:
            self._log.write(sink, records)
        self._num_files += 1
        self._names.add(name)
        return name

    def remove(self) -> None:
        """Remove the logs that this journal has read or written, once the part is there.

        The run's end removes all other logs.
        """
        with self._writing, suppress(OSError, RunError):
            self._is_closed = True
            for name in self._names:
                self._storage.remove(os.path.join(self._folder, name))
