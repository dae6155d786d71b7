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
    """Return the runner of a shard's rows. In the end it has one answer for each row.

    rows: the rows, with the Answer in place of a row that has one already. number_of: gives a row's number in the run.
    memo: holds the answers of other shards, by whole keys. memo_keys: the whole keys of the rows. let_go: called with
    each row whose texts are no longer needed. is_over: whether the run's deadline has passed. Then no further row is
    begun.
    Rows are asked in the order of their prompts. Equal rows with equal answers are asked once.
    """

    def begin(row: Row, place: int) -> Item[Answer]:
        """Begin a row's item, which holds what it needs of the row. place: the row's place in `rows`."""
        let_go(row)
        return ask.begin(row, number_of(place))

    def expired() -> Answer | None:
        """Return the answer of rows that are not begun any more; None while the run goes on."""
        return ask.failed(EXPIRED) if is_over() else None

    answers: list[Answer | None] = []
    for row in rows:
        answer = None
        if isinstance(row, RowProblem):
            answer = ask.failed(str(row))
        elif isinstance(row, Answer):
            answer = row
        answers.append(answer)

    # An entry is one item, with the places of all rows that get its answer.
    shared_entries: dict[Row, Entry[Answer]] = {}  # of rows whose equal rows get the same answer
    rows_and_entries: list[tuple[Row, Entry[Answer]]] = []
    for place, row in enumerate(rows):
        if not isinstance(row, Row):
            continue
        if row in shared_entries:
            shared_entries[row].places.append(place)
            continue
        entry: Entry[Answer] = Entry([place], partial(begin, row, place))
        if ask.is_greedy(row):
            if memo_keys is not None:
                entry.memo_key = memo_keys[place].tobytes()
            shared_entries[row] = entry
        rows_and_entries.append((row, entry))

    rows_and_entries.sort(key=lambda pair: pair[0])
    entries = [entry for _, entry in rows_and_entries]
    if memo is None:
        memo = AnswerMemo(0)  # it remembers nothing
    return ItemRunner(entries, answers, ask, checks, memo, expired=expired)
