"""A planned run on disk: its plan, its parts, and the check that ends it.

Files know no transactions, and whoever is about to rename or remove one may have been frozen since it looked. So
nothing here takes a whole part away, and the mark of the end changes only by renames of files that each execution names
for itself, its claims. Who ends the run makes one, removes all claims to withdraw its end, looks at every part, and
renames its claim to `_SUCCESS`; who finds a part missing does the reverse. Of two that meet, the later look is the
newer, and has removed the other's claim, whose rename fails: it looks again. Who replaces a part does likewise. A mark
that is withdrawn is a link to nowhere: to remove it could hit the one that comes after it.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import islice

from jobs.errors import PartDamaged, RunError, RunResubmitted
from jobs.parquet.files.storage import Storage, replace_file, writing
from jobs.parquet.formats.converted_inputs import remove_converted
from jobs.parquet.outputs.output_file import part_reasons, write_output
from jobs.parquet.outputs.part import read_part_stats
from jobs.parquet.outputs.plan_file import load_plan, manifest_of, write_text
from jobs.runs.control import remove_waiting
from jobs.runs.end_notices import tell_end, tell_shards_failed
from jobs.runs.plans.names import (
    JOURNAL,
    MANIFEST,
    PLAN,
    REPORT,
    SUCCESS,
    TEMPORARY_PREFIX,
    WITHDRAWAL,
    is_temporary,
    output_names,
    part_name,
    part_shard,
    replacement_name,
    shard_job_id,
    temporary_name,
)
from jobs.runs.plans.plan import Plan
from jobs.runs.redis_state.recorded_parts import MAX_PARTS, PartCount, record_reasons, recorded_reasons
from jobs.runs.redis_state.run_index import list_in_index
from jobs.runs.redis_state.state import RunState
from jobs.runs.statistics.part_stats import PartStats
from jobs.runs.statistics.reasons import Reasons
from jobs.runs.statistics.report import report_html

#: What a listing shows of a mark that was withdrawn.
_WITHDRAWN_TEXT = "withdrawn: a part is missing"


class RunFolder:
    """The output folder of one run, as one execution sees it."""

    def __init__(self, storage: Storage, plan: Plan, state: RunState, execution_id: str) -> None:
        self.plan = plan  # the newest one that this execution has read, see `refresh`
        self.state = state
        self.storage = storage
        self._path, self._parts_path = plan.spec.output, plan.spec.parts_folder
        self.execution_id, self.journal = execution_id, self.path(JOURNAL)

    def refresh(self) -> bool:
        """Read the plan again where it was extended since; return whether it was.

        Its shards are as they were, and others come behind them: who computes one may go on with the former
        plan, but who ends the run may not. Raises PlanDamaged.
        """
        path = self.path(PLAN)
        state = self.storage.stat(path)
        if state is None or state == self.plan.file_state:  # without the file, as it was read
            return False
        before, self.plan = self.plan, load_plan(self.storage, path)
        return self.plan != before

    def path(self, name: str) -> str:
        return os.path.join(self._path, name)

    def temporary_path(self, name: str) -> str:
        """Return where this execution writes `name`, so that no two executions share a file."""
        return self.path(temporary_name(self.execution_id, name))

    def temporary_part(self, shard: int) -> str:
        """Return where this execution writes a part: in the folder in which it is published."""
        return os.path.join(self._parts_path, temporary_name(self.execution_id, part_name(shard)))

    def temporary_replacement(self, shard: int) -> str:
        """Return where this execution writes what takes the place of a part."""
        name = temporary_name(self.execution_id, replacement_name(part_name(shard)))
        return os.path.join(self._parts_path, name)

    def make_parts_folder(self) -> None:
        """Make the folder of the parts, if they have one of their own. Raises OutputNotWritable."""
        if self._parts_path != self._path:
            with writing(self._parts_path):
                self.storage.make_folder(self._parts_path)

    def make_journal_folder(self) -> None:
        """Make the folder of journals, which nobody else makes. Raises OutputNotWritable.

        It gets its name by a rename, which finds nothing where the run has ended in between.
        """
        temporary = self.temporary_path(JOURNAL)
        with writing(self.journal):
            self.storage.make_folder(temporary)
            self.storage.move_folder(temporary, self.journal)

    def _remove_journal(self) -> None:
        """Remove it with all in it, as far as that can be."""
        with suppress(OSError):
            for name in self.storage.names(self.journal):
                self.storage.remove(os.path.join(self.journal, name))
            self.storage.remove_folder(self.journal)

    def has_part(self, shard: int) -> bool:
        return self.storage.stat(self.plan.part_path(shard)) is not None

    def shards_with_parts(self) -> set[int]:
        """Return the shards whose part is there. Raises PartDamaged for a part that no shard has."""
        while True:
            found = self._numbers_of_parts()
            if not found or max(found) < len(self.plan.shards):
                return found
            if not self.refresh():
                raise self._part_of_no_shard(max(found))

    def _numbers_of_parts(self) -> set[int]:
        numbers = map(part_shard, self._names_of_parts())
        return {shard for shard in numbers if shard is not None}

    def _names_of_parts(self) -> list[str]:
        try:
            return self.storage.names(self._parts_path)
        except FileNotFoundError:
            if self._parts_path == self._path:
                raise
            return []  # no part was written yet

    def _part_of_no_shard(self, number: int) -> PartDamaged:
        return PartDamaged(self.plan.part_path(number), f"this run has {len(self.plan.shards)} shards")

    def part_stats(self, shard: int) -> PartStats:
        """Read a part's statistics. Raises PartDamaged unless it holds exactly its shard's rows."""
        rows = self.plan.shards[shard].rows
        return read_part_stats(self.storage, self.plan.part_path(shard), self.plan.run, shard, rows)

    def damaged_parts(self, check_interrupted: Callable[[], None]) -> dict[int, PartDamaged]:
        """Look into every part; return, by number, what is wrong with those not this run's. check_interrupted: called
        before each."""
        damaged = {}
        for shard in sorted(self._numbers_of_parts()):
            check_interrupted()
            try:
                if shard >= len(self.plan.shards):
                    raise self._part_of_no_shard(shard)
                self.part_stats(shard)
            except PartDamaged as error:
                damaged[shard] = error
        return damaged

    def has_empty_part(self) -> bool:
        """Whether the first part is the one of this run without rows, which none of its shards writes."""
        try:
            read_part_stats(self.storage, self.plan.part_path(0), self.plan.run, 0, rows=0)
        except PartDamaged:
            return False
        return True

    def delete_surplus(self, shards: Iterable[int]) -> None:
        """Remove parts that no shard of the run has: none come in their place. Raises OutputNotWritable."""
        for path in (self.plan.part_path(shard) for shard in shards if shard >= len(self.plan.shards)):
            with writing(path):
                self.storage.remove(path)

    def publish(self, temporary: str, shard: int) -> bool:
        """Put a written part in place; return False when the place was taken. Raises OutputNotWritable."""
        with writing(self.plan.part_path(shard)):
            return self.storage.publish(temporary, self.plan.part_path(shard))

    def publish_over_damaged(self, temporary: str, shard: int) -> bool:
        """Put the temporary_replacement in place, also of a damaged part; return False as `replace_part` does."""
        if self.publish(temporary, shard):
            return True
        return self.replace_part(temporary, shard, lambda: not self.has_whole_part(shard))

    def replace_part(self, temporary: str, shard: int, may: Callable[[], bool]) -> bool:
        """Put a written part over the one that is there; see jobs.parquet.files.storage. temporary: this
        execution's temporary_replacement."""
        path, of = self.plan.part_path(shard), replacement_name(part_name(shard))
        return replace_file(self.storage, temporary, path, of, may)

    def has_whole_part(self, shard: int) -> bool:
        """Whether the part is there and is what this run has written."""
        with suppress(PartDamaged):
            self.part_stats(shard)
            return True
        return False

    def _whole_parts(self, suspects: Collection[int]) -> set[int]:
        """Return the shards whose part is there; only suspects are looked into."""
        planned = self._numbers_of_parts() & set(range(len(self.plan.shards)))
        return {shard for shard in planned if shard not in suspects or self.has_whole_part(shard)}

    def missing_shards(self, suspects: Collection[int] = ()) -> list[int]:
        """Return the shards that have no part, or a damaged one; only suspects are looked into for that."""
        return sorted(set(range(len(self.plan.shards))) - self._whole_parts(suspects))

    def record_part(self, stats: PartStats, queue: str) -> bool:
        """Count a published part and end the run if it was the last; return whether the run has ended."""
        self._record_reasons(stats)
        return self._ended(self.state.record_part(stats), queue)

    def record_replaced_part(self, shard: int, queue: str) -> bool:
        """Record the newest part, as `record_part`, where others may replace it meanwhile."""

        def read() -> PartStats:
            stats = self.part_stats(shard)
            self._record_reasons(stats)
            return stats

        return self._ended(self.state.record_newest_part(read), queue)

    def _ended(self, count: PartCount, queue: str) -> bool:
        if count.total is None:  # Redis lost our keys: in doubt, the parts themselves are counted
            return self.recount(queue)
        if count.done >= count.total:
            return self._finish()
        self._stop_where_too_many_fail(count.total, queue)
        tell_shards_failed(self.state, count)
        return False

    def _record_reasons(self, stats: PartStats) -> None:
        reasons = Reasons()
        if stats.errors:
            with suppress(RunError):  # whoever ends the run looks at each part, and says what is wrong with it
                reasons = part_reasons(self.storage, self.plan, stats.shard)
        record_reasons(self.state.connection, self.plan.run, stats.shard, reasons)

    def _stop_where_too_many_fail(self, shards: int, queue: str) -> None:
        verdict = self.state.judge()
        if verdict is None:
            return
        with suppress(RunResubmitted):  # perhaps with another limit, which judges the next parts
            tell_end(self.state, verdict)  # first: a run that is stopped tells nothing
            self.state.stop(verdict)
            waiting = sorted(set(range(shards)).difference(part.shard for part in self.state.each_part()))
            ids = [shard_job_id(self.plan.run, shard) for shard in waiting]
            remove_waiting(self.state, verdict.submission, queue, ids)

    def recount(self, queue: str, damaged: Collection[int] = ()) -> bool:
        """Rebuild the run's state from the parts that are there; end the run if none is missing. damaged: count as
        missing."""
        self.refresh()
        size: dict[str, str | int] = {"rows": self.plan.rows, "shards": len(self.plan.shards)}
        size["sizes"] = json.dumps(self.plan.shares)
        model = {"model": self.plan.model.fingerprint, "model_text": str(self.plan.model)}
        self.state.describe({"output": self._path, "queue": queue, **size, **model})
        recorded = self.state.records()  # before the listing: what is in both is certain
        self.shards_with_parts()
        present = self._whole_parts(damaged)
        found = {shard: self.part_stats(shard) for shard in present - recorded.keys()}
        gone = {shard: record for shard, record in recorded.items() if shard not in present}
        for stats in islice((each for each in found.values() if each.errors), MAX_PARTS):
            self._record_reasons(stats)
        count = self.state.amend_parts(found, gone, len(self.plan.shards))
        self.state.count_anew()
        list_in_index(self.state.connection, self.plan.run)
        return count.done >= len(self.plan.shards) and self._finish()

    def has_success(self) -> bool:
        return self.storage.stat(self.path(SUCCESS)) is not None

    def withdraw_end(self, suspects: Collection[int] = (), anyway: bool = False) -> list[int]:
        """Take back the end of a run with a part missing, damaged, or of no shard; return what is missing.

        suspects: as for missing_shards. anyway: also where none is. Raises OutputNotWritable.
        """
        while True:
            end = self.state.end()
            if self._is_whole(suspects) and not anyway:
                return []
            if self.state.withdraw_finished(end) and self._withdraw_success(suspects, anyway):
                return self.missing_shards(suspects)

    def _is_whole(self, suspects: Collection[int]) -> bool:
        planned = set(range(len(self.plan.shards)))
        if not (self._numbers_of_parts() <= planned and self._whole_parts(suspects) == planned):
            return False
        outputs = map(self.path, self._outputs)
        return not self.has_success() or all(self.storage.stat(path) is not None for path in outputs)

    @property
    def _outputs(self) -> tuple[str, ...]:
        return output_names(self.plan.spec.single_file)

    def _withdraw_success(self, suspects: Collection[int], anyway: bool) -> bool:
        """Take the mark back; return False when an end came in between, or is right after all."""
        claim, mark = self.temporary_path(WITHDRAWAL), self.path(SUCCESS)
        with writing(mark):
            self.storage.make_void(claim, _WITHDRAWN_TEXT)
            for name in (SUCCESS, MANIFEST, REPORT, *self._outputs):
                self._delete_temporary(name)
            if self._is_whole(suspects) and not anyway:
                self.storage.remove(claim)
                return False
            if self.has_success():
                return self.storage.rename(claim, mark)
            return self.storage.remove(claim)

    def _delete_temporary(self, of: str) -> None:
        """Remove what executions have written of a file and not published."""
        for name in self.storage.names(self._path):
            if is_temporary(name, of):
                self.storage.remove(self.path(name))

    def _finish(self) -> bool:
        """Check every part, then write manifest and mark, perhaps again; return False when a part is missing."""
        while self._has_all_parts():
            end = self.state.end()
            if (self.has_success() or self._write_end()) and self.state.mark_finished(end):
                self.state.count_anew()
                tell_end(self.state)
                # Also of whoever thawed after the end, and was killed while it wrote.
                with suppress(RunError):  # a finished run may be read-only
                    self._remove_leftovers()
                return True
        return False

    def _has_all_parts(self) -> bool:
        """Whether each shard has a part, also of a plan that was extended since this execution read it."""
        self.refresh()
        found = self.shards_with_parts()
        return found == set(range(len(self.plan.shards)))

    def _write_end(self) -> bool:
        """Write the one output file, if it is to be, the manifest, then the mark; return False when a claim
        was removed, as a part may be missing, or the plan was extended."""
        names = (*self._outputs, REPORT, MANIFEST, SUCCESS)
        targets, claims = list(map(self.path, names)), list(map(self.temporary_path, names))
        try:
            with writing(self._path):
                for claim in claims:
                    write_text(self.storage, claim, "")
                self._delete_temporary(WITHDRAWAL)
                if self.refresh():  # whoever extended it removes the claims that were made before
                    return False
                reasons = recorded_reasons(self.state.connection, self.plan.run)
                parts = map(self.part_stats, range(len(self.plan.shards)))
                summary, text = manifest_of(self.plan, parts, reasons)
                *outputs, report, manifest, _ = claims
                if outputs and not write_output(self.storage, self.plan, outputs):
                    return False
                if not self.storage.rewrite(report, report_html(summary).encode()):
                    return False
                if not self.storage.rewrite(manifest, text.encode()) or self.storage.stat(claims[-1]) is None:
                    return False  # a store brings a claim back that it writes anew, but not the mark's
                if self.refresh():
                    return False
                remove_converted(self.storage, self.plan)
                self._remove_journal()
                return all(self.storage.replace(claim, target) for claim, target in zip(claims, targets, strict=True))
        finally:
            for claim in claims:
                self.storage.remove(claim)

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of all executions; one that still runs finds its part there."""
        self._delete_leftovers(self._path, self.storage.names(self._path))
        self._remove_journal()
        if self._parts_path != self._path:
            self._delete_leftovers(self._parts_path, self._names_of_parts())

    def _delete_leftovers(self, folder: str, names: Iterable[str]) -> None:
        for name in (name for name in names if name.startswith(TEMPORARY_PREFIX)):
            path = os.path.join(folder, name)
            with writing(path):
                (self.storage.remove_folder if is_temporary(name, JOURNAL) else self.storage.remove)(path)
