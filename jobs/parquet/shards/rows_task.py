"""A task that asks rows of a run again: its requests, and their deliveries."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from jobs.context import JobContext
from jobs.context.answers import AnswerMemo
from jobs.parquet.files.fingerprint import unchanged
from jobs.parquet.files.storage import Storage
from jobs.parquet.formats.converted_inputs import converted_for_now
from jobs.parquet.prompts.sources import read_source
from jobs.parquet.shards.shard_requests import ShardRequests
from jobs.parquet.shards.shard_texts import ShardTexts, rendered_shards
from jobs.parquet.shards.shard_work import check_model, shard_requests
from jobs.runs.plans.plan import Plan
from jobs.tasks import Completion, OpenTask, Request


class RowsTask(OpenTask):
    """What a subclass makes of the answers is its own; it calls `ask` when it is made."""

    _requests: ShardRequests
    _texts: ShardTexts

    def ask(self, context: JobContext, storage: Storage, plan: Plan, rows: Sequence[int]) -> None:
        """Read rows of a run, in their order, to ask them as the run has.

        Raises RunOfAnotherModel, RunError or NoRoomYet.
        """
        check_model(plan, context.model)
        context.checks.admit(plan.spec.repairs)
        wanted, source = set(rows), read_source(plan.spec, context.check_sampling)
        files = {plan.shards[shard].file for shard in plan.shards_of(wanted)}
        self._texts = ShardTexts(plan.spec.output, source.columns, context.shard_bytes, "ask fewer rows")
        try:
            with ExitStack() as stack:
                limit = context.shard_bytes.limit
                storage, plan = stack.enter_context(converted_for_now(storage, plan, files, limit))
                for number in sorted(files):
                    file = plan.files[number]
                    file = replace(file, path=storage.resolve(file.path))
                    stack.enter_context(unchanged(storage, plan, file))
                for start, rendered in rendered_shards(context, storage, plan, source, wanted):
                    self._texts.add(row for number, row in enumerate(rendered, start) if number in wanted)
            texts, let_go, nothing_known = self._texts.gathered(), self._texts.let_go, AnswerMemo(0)
            self._requests = shard_requests(
                context, plan, source, texts, rows.__getitem__, nothing_known, let_go
            )
        except BaseException:
            self._texts.close()
            raise

    def requests(self) -> Iterator[Request]:
        return self._requests.requests()

    @property
    def num_requests(self) -> int | None:
        return self._requests.num_requests

    @property
    def has_more(self) -> bool:
        return self._requests.has_more

    @property
    def inspects(self) -> bool:
        return self._requests.inspects

    def inspect(self, index: int, completions: Sequence[Completion]) -> None:
        self._requests.inspect(index, completions)

    def deliver(self, index: int, completions: Sequence[Completion]) -> None:
        self._requests.deliver(index, completions)

    def close(self) -> None:
        self._requests.close()
        self._texts.close()
