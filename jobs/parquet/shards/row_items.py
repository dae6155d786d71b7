"""Makes the runner that asks a shard's rows."""

from collections.abc import Callable, Sequence
from functools import partial

from jobs.context.answers import Answer, AnswerMemo
from jobs.context.checks import Checks
from jobs.context.deadlines import EXPIRED
from jobs.items.item import Item
from jobs.items.runner import ItemRunner
from jobs.items.under_way import Entry
from jobs.parquet.asks.ask import RowAsk
from jobs.parquet.asks.row_keys import Keys
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.tables.columns import RowProblem


def row_runner(
    rows: Sequence[Row | RowProblem | Answer],
    ask: RowAsk,
    checks: Checks,
    number_of: Callable[[int], int],
    *,
    memo: AnswerMemo | None = None,
    memo_keys: Keys | None = None,
    let_go: Callable[[Row], None] = lambda row: None,
    is_over: Callable[[], bool] = lambda: False,
) -> ItemRunner[Answer]:
    """Return the runner of a shard's rows. Once all requests are delivered, it has one answer for each row.

    Rows are asked in the order of their prompts. If equal rows must get the same answer, only one of them is asked.
    rows: the rows, with an Answer in place of each row that has an answer already. number_of: takes the index of a row
    in `rows`, and returns the row's number in the run. memo: holds the answers of other shards, by whole keys. A whole
    key names what a row asks and the model that answers; see row_keys.py. memo_keys: the whole keys of the rows.
    let_go: called with each row whose texts are no longer needed. is_over: returns whether the run's deadline has
    passed; from then on, no further row is begun.
    """

    def begin(row: Row, place: int) -> Item[Answer]:
        """Begin a row's item. place: the row's index in `rows`."""
        let_go(row)  # the item keeps what it needs, so the row's texts are no longer needed
        return ask.begin(row, number_of(place))

    def expired() -> Answer | None:
        """Return the answer of rows that were not begun before the deadline; None before the deadline."""
        return ask.failed(EXPIRED) if is_over() else None

    answers = [_known_answer(row, ask) for row in rows]
    entries = _entries(rows, ask, begin, memo_keys)
    if memo is None:
        memo = AnswerMemo(0)  # it remembers nothing
    return ItemRunner(entries, answers, ask, checks, memo, expired=expired)


def _known_answer(row: Row | RowProblem | Answer, ask: RowAsk) -> Answer | None:
    """Return the answer that is known before a row is asked; None if the row must be asked."""
    if isinstance(row, RowProblem):
        return ask.failed(str(row))
    return row if isinstance(row, Answer) else None


def _entries(
    rows: Sequence[Row | RowProblem | Answer],
    ask: RowAsk,
    begin: Callable[[Row, int], Item[Answer]],
    memo_keys: Keys | None,
) -> list[Entry[Answer]]:
    """Return the items to ask, each in an entry with the places of all rows that it answers.

    The entries are sorted by their rows. begin: returns the item of a row; its second argument is the row's index in
    `rows`. memo_keys: see row_runner.
    """
    # The entries of deterministic rows. Equal rows of this kind share one entry, and so get the same answer.
    shared_entries: dict[Row, Entry[Answer]] = {}
    rows_and_entries: list[tuple[Row, Entry[Answer]]] = []
    for place, row in enumerate(rows):
        if not isinstance(row, Row):
            continue
        if row in shared_entries:
            shared_entries[row].places.append(place)
            continue
        entry: Entry[Answer] = Entry([place], partial(begin, row, place))
        if ask.is_deterministic(row):
            if memo_keys is not None:
                entry.memo_key = memo_keys[place].tobytes()
            shared_entries[row] = entry
        rows_and_entries.append((row, entry))

    rows_and_entries.sort(key=lambda pair: pair[0])
    return [entry for _, entry in rows_and_entries]
