"""Keeps a planned run on disk: its plan, its parts, and the files that are written at its end.

Nothing here replaces a file or removes a part. `Storage.publish` gives a file its name, and only the first call for a
name succeeds. So an execution that was frozen for a long time changes no file that is there. `_SUCCESS` is written
last, and nothing is written into the folder after it. Two executions may end a run at the same time. An execution may
also be killed while it ends a run, and then another execution ends the run. Both executions write equal files, because
both make the files from the same parts.
"""

import json
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from jobs.common.keys import FORMAT
from jobs.errors import (
    InputNotFound,
    OutputHoldsAnotherRun,
    OutputHoldsForeignFiles,
    OutputNotWritable,
    PartDamaged,
    PathOutsideRoots,
    PlanDamaged,
    PlanOfAnotherVersion,
    RunError,
    RunResubmitted,
)
from jobs.parquet.files.storage import Storage, reading, writing
from jobs.parquet.formats.converted_inputs import remove_working_folders
from jobs.parquet.outputs.examples import examples_of
from jobs.parquet.outputs.output_file import failed_rows, write_output
from jobs.parquet.outputs.part import read_part_stats
from jobs.runs.control import remove_waiting
from jobs.runs.end_notices import enqueue_notices, notify_if_rest_failed, stop_over_limit
from jobs.runs.plans import names as run_names
from jobs.runs.plans.names import (
    INPUT,
    KEYS,
    PLAN,
    REUSED,
    TEMPORARY_PREFIX,
    output_names,
    part_name,
)
from jobs.runs.plans.plan import AnotherFormat, Plan
from jobs.runs.redis_state.state import (
    MAX_PARTS,
    REUSE_DIFFERS,
    RunState,
    record_reasons,
    recorded_reasons,
)
from jobs.runs.statistics.report import report_html
from jobs.runs.statistics.run_statistics import IN_MANIFEST, PartStats, Reasons, RunStatistics

MAX_PLAN_BYTES = 256 << 20


def find_plan(storage: Storage, folder: str) -> Plan | None:
    """Return the plan in a folder, or None. Raises OutputNotWritable, or the errors of load_plan."""
    path = os.path.join(folder, PLAN)
    # `stat` only reads, but a folder that it cannot reach cannot be written either. So the error is OutputNotWritable.
    with writing(path):
        if storage.stat(path) is None:
            return None
    return load_plan(storage, path)


def load_plan(storage: Storage, path: str) -> Plan:
    """Read a plan. Raises PlanOfAnotherVersion, or PlanDamaged if the file is missing or does not hold a plan."""
    try:
        with reading(path), storage.open_input(path) as source:
            content = source.read(min(source.size(), MAX_PLAN_BYTES))
        return Plan.from_text(content.decode())
    except AnotherFormat as error:
        age = "a newer" if error.number > FORMAT else "an older"
        raise PlanOfAnotherVersion(path, age, error.number, FORMAT) from None
    except InputNotFound:
        raise PlanDamaged(path, "there is no such file") from None
    except ValueError as error:
        raise PlanDamaged(path, str(error)) from error


def create_plan(storage: Storage, plan: Plan, execution_id: str) -> bool:
    """Write a plan; return False if another planner was first. Raises the errors of begin_folder and Storage.put."""
    path = os.path.join(plan.spec.output, PLAN)
    content = plan.to_text().encode()
    if not begin_folder(storage, plan.spec.output):
        return False
    return storage.put(path, execution_id, lambda sink: sink.write(content))


def begin_folder(storage: Storage, folder: str) -> bool:
    """Make a new run's folder; return False if it has a plan already.

    Raises OutputHoldsAnotherRun or OutputHoldsForeignFiles.
    """
    segments = folder.split("/")
    # PathOutsideRoots ends this search for a run in the folders above. It is raised at the first folder above a root.
    with suppress(PathOutsideRoots):
        for num_segments in range(len(segments) - 1, 0, -1):
            above = "/".join(segments[:num_segments])
            if storage.stat(os.path.join(above, PLAN)) is not None:
                raise OutputHoldsAnotherRun(above, f"{folder} lies in its folder")
    with writing(folder):
        storage.make_folder(folder)
        names = storage.names(folder)
    if PLAN in names:
        # The files are not checked: parts may be there, if another planner has enqueued their shards.
        return False
    for name in names:
        if not name.startswith((TEMPORARY_PREFIX, INPUT, KEYS, REUSED)):
            raise OutputHoldsForeignFiles(folder, name)
    return True


#: Fields of PartStats about the workers that answered. A manifest lists the distinct values of all parts.
_WORKER_FIELDS = ("model", "fingerprint", "dtype", "attention_backend", "version", "commit")


def manifest_of(plan: Plan, parts: Iterable[PartStats], reasons: Reasons) -> dict[str, Any]:
    """Return the manifest of a finished run. parts: the statistics of all parts, in the parts' order.

    The manifest's `seconds` are the time from the first shard's start to the last shard's end.
    """
    counts = dict.fromkeys(IN_MANIFEST, 0)
    started_at = math.inf
    ended_at = -math.inf

    values_of_workers: dict[str, set[str]] = {name: set() for name in _WORKER_FIELDS}
    if plan.second is not None:
        # The workers of the second model write the parts, so a part does not name the first model.
        first = plan.model
        values_of_workers |= {
            "model": {first.name},
            "fingerprint": {first.fingerprint},
            "dtype": {first.dtype},
        }

    listed_parts: list[dict[str, Any]] = []
    statistics = RunStatistics()
    for part in parts:
        statistics.add(part)
        for name in IN_MANIFEST:
            counts[name] += getattr(part, name)
        started_at = min(started_at, part.started_at)
        ended_at = max(ended_at, part.ended_at)
        for name in _WORKER_FIELDS:
            values_of_workers[name].add(getattr(part, name))
        listed_parts.append(
            {"name": part_name(part.shard), "rows": part.rows, "errors": part.errors}
        )

    worker_texts = {name: ", ".join(sorted(values)) for name, values in values_of_workers.items()}
    optional: dict[str, Any] = {}
    if plan.spec.single_file is not None:
        optional["output"] = output_names(plan.spec.single_file)
    if plan.reused is not None:
        optional["reused"] = plan.reused.runs
    return {
        "run": plan.run,
        **counts,
        "started_at": started_at,
        "ended_at": ended_at,
        "seconds": ended_at - started_at,
        **worker_texts,
        "statistics": statistics.to_object(reasons),
        "sampling": plan.spec.sampling,
        "seed": plan.seed,
        "arguments": plan.spec.to_json(),
        **optional,
        "inputs": [asdict(file) for file in plan.files],
        "parts": listed_parts,
    }


def _reuse_facts(plan: Plan) -> dict[str, str | int]:
    """Return the field for Redis that says what earlier runs asked differently; {} if the plan notes no difference.

    Planning notes differences only if it could take few answers of earlier runs.
    """
    if plan.reused is None:
        return {}
    texts = []
    for run in plan.reused.runs:
        if run.get("differs"):
            texts.append(f"{run['output']}: {', '.join(run['differs'])}")
    if not texts:
        return {}
    return {REUSE_DIFFERS: "; ".join(texts)}


_GONE = "it is gone"


class RunFolder:
    """The output folder of one run. Each execution of a job has an object of its own for the folder."""

    def __init__(self, storage: Storage, plan: Plan, state: RunState, execution_id: str) -> None:
        self.plan = plan
        self.state = state
        self.storage = storage
        self.execution_id = execution_id
        self._path = plan.spec.output
        self._parts_path = plan.spec.parts_folder
        self.journal = self.path(run_names.JOURNAL)
        self._outputs = run_names.output_names(plan.spec.single_file)
        self._end_files = (*self._outputs, run_names.REPORT, run_names.MANIFEST)

    def path(self, name: str) -> str:
        """Return the path of a name in the folder."""
        return os.path.join(self._path, name)

    def put_part(self, shard: int, write: Callable[[Any], object]) -> bool:
        """Write a part with `write`, and put it in its place. Return False if the shard has a part already.

        The parts may have a folder of their own, which is made first.
        """
        if self._parts_path != self._path:
            self.storage.make_folder(self._parts_path)
        return self.storage.put(self.plan.part_path(shard), self.execution_id, write)

    def make_journal_folder(self) -> None:
        """Make the folder of journals, unless the run has ended."""
        with writing(self.journal):
            self.storage.make_folder(self.journal)
            if self.has_success():  # looked for last, because the run may end at any moment
                self.storage.remove(self.journal)

    def has_part(self, shard: int) -> bool:
        """Whether a shard's part is there."""
        return self.storage.stat(self.plan.part_path(shard)) is not None

    def lacks(self, shard: int) -> bool:
        """Whether a shard is still to be computed. Raises PartDamaged if the run has ended without its part."""
        if self.has_part(shard):
            return False
        # Since `has_part` was called, another execution may have put the part there and ended the run. So the part is
        # looked for again after `has_success`.
        if self.has_success() and not self.has_part(shard):
            raise PartDamaged(self.plan.part_path(shard), _GONE)
        return True

    def shards_with_parts(self) -> set[int]:
        """Return the shards whose part is there. Raises PartDamaged for a part of a shard that is not in the plan."""
        names = self.storage.names(self._parts_path)
        shards = set(run_names.part_shards(names))
        if shards and max(shards) >= len(self.plan.shards):
            raise PartDamaged(
                self.plan.part_path(max(shards)), f"this run has {len(self.plan.shards)} shards"
            )
        return shards

    def part_stats(self, shard: int) -> PartStats:
        """Return a part's statistics. Raises PartDamaged."""
        return read_part_stats(self.storage, self.plan, shard)

    def missing_shards(self, check_interrupted: Callable[[], None]) -> list[int]:
        """Read every part; return the shards that have no part. check_interrupted: called before each part is read.

        A run that has not ended may already have files that were made from all parts, such as the report. If a part is
        now missing, these files are removed. Raises PartDamaged for a damaged part. Once the run has ended, a missing
        part or output file counts as damaged.
        """
        has_ended = self.has_success()
        # The files of a run's end are written only once all parts are there. Here they are looked for before the parts.
        # So if one of these files is there and a part is not, the part was removed.
        end_files = [name for name in self._end_files if self._is_there(name)]
        present = self.shards_with_parts()
        for shard in sorted(present):
            check_interrupted()
            self.part_stats(shard)
        all_shards = set(range(len(self.plan.shards)))
        missing = sorted(all_shards - present)
        if has_ended:
            needed_paths = [self.plan.part_path(shard) for shard in missing]
            needed_paths += [self.path(name) for name in self._outputs]
            for path in needed_paths:
                if self.storage.stat(path) is None:  # a part may be there by now
                    raise PartDamaged(path, _GONE)
        elif missing:
            for name in end_files:
                path = self.path(name)
                with writing(path):
                    self.storage.remove(path)
        return missing

    def record_part(self, stats: PartStats, queue: str) -> bool:
        """Count a published part, and end the run if it was the last part. Return whether the run has ended."""
        self._record_reasons(stats)
        count = self.state.record_part(stats)
        if count.total is None:  # Redis has lost the run's keys
            return self.recount(queue)
        if self._stop_if_over_limit(queue, has_all_parts=count.has_all_parts):
            return False
        if count.has_all_parts:
            return self._finish()
        notify_if_rest_failed(self.state, count)
        return False

    def _record_reasons(self, stats: PartStats) -> None:
        """Read from a part why its rows have errors, and keep the reasons in Redis."""
        reasons = Reasons()
        if stats.errors:
            # The error of a damaged part is ignored here. It is raised again at the run's end, which reads each part.
            with suppress(RunError):
                for row, reason in failed_rows(self.storage, self.plan, stats.shard):
                    reasons.add(reason, [row])
        record_reasons(self.state.connection, self.plan.run, stats.shard, reasons)

    def _stop_if_over_limit(self, queue: str, *, has_all_parts: bool) -> bool:
        """Stop the run if more rows have an error than its submission allows. Return whether the run is stopped.

        Must be called before a run is ended, because a stopped run must not end, even if all its parts are there.
        """
        verdict = self.state.judge(has_all_parts=has_all_parts)
        is_within_limit = verdict is None
        if is_within_limit or self.has_success():
            return False
        submission = stop_over_limit(self.state, has_all_parts=has_all_parts)
        if submission is None:  # the run was judged again in a transaction, and goes on
            return False
        all_shards = set(range(len(self.plan.shards)))
        waiting_shards = sorted(all_shards - self.state.recorded_shards())
        with suppress(RunResubmitted):
            # If the run is submitted again meanwhile, its jobs stay. The new submission may have another limit, which
            # is judged when the next part is recorded.
            for name, is_second in self.plan.queues(queue):
                job_ids = []
                for shard in waiting_shards:
                    job_ids.append(run_names.shard_job_id(self.plan.run, shard, is_second))
                remove_waiting(self.state, submission, name, job_ids)
        return True

    def recount(self, queue: str) -> bool:
        """Rebuild the run's state from its parts. If no part is missing, end the run. Return whether it has ended."""
        self.state.describe({**self._facts(queue), **_reuse_facts(self.plan)})

        # A part is recorded only after it was put into the folder, and here the records are read before the folder. So
        # if the folder lacks a recorded part, the part was removed.
        recorded = self.state.records()
        present = self.shards_with_parts()
        unrecorded_parts = {shard: self.part_stats(shard) for shard in present - recorded.keys()}
        gone_records = {shard: record for shard, record in recorded.items() if shard not in present}
        parts_with_errors = [stats for stats in unrecorded_parts.values() if stats.errors]
        # Redis keeps the reasons of at most MAX_PARTS parts.
        for stats in parts_with_errors[:MAX_PARTS]:
            self._record_reasons(stats)
        count = self.state.amend_parts(unrecorded_parts, gone_records, len(self.plan.shards))
        if not count.has_all_parts:
            return False
        if self._stop_if_over_limit(queue, has_all_parts=True):
            return False
        return self._finish()

    def _facts(self, queue: str) -> dict[str, str | int]:
        """Return what Redis keeps about the run, beside the counts of its parts. queue: the run's queue."""
        facts: dict[str, str | int] = {
            "output": self._path,
            "queue": queue,
            "format": FORMAT,
            "rows": self.plan.rows,
            "shards": len(self.plan.shards),
            "sizes": json.dumps(self.plan.shares),
            "model": self.plan.model.pin,
            "model_text": str(self.plan.model),
        }
        second = self.plan.second
        if second is not None:
            facts["second_model"] = second.pin
            facts["second_text"] = str(second)
            for queue_name, is_second in self.plan.queues(queue):
                if is_second:
                    facts["second_queue"] = queue_name
        return facts

    def has_success(self) -> bool:
        """Whether the run has ended: whether its folder has `_SUCCESS`."""
        return self._is_there(run_names.SUCCESS)

    def _finish(self) -> bool:
        """End the run, unless a part is missing; return whether it has ended. Raises RunError."""
        manifest: dict[str, Any] = {}  # stays empty if another execution has written it
        if not self.has_success():
            if len(self.shards_with_parts()) < len(self.plan.shards):
                return False
            manifest = self._write_end()
        self.state.mark_finished(manifest)
        enqueue_notices(self.state, self.state.submission(), "finished")
        return True

    def _write_end(self) -> dict[str, Any]:
        """Write the output files, the report and the manifest, then `_SUCCESS`; return the manifest."""
        reasons = recorded_reasons(self.state.connection, self.plan.run)
        parts = map(self.part_stats, range(len(self.plan.shards)))
        summary = manifest_of(self.plan, parts, reasons)
        manifest_text = json.dumps(summary, indent=2)
        examples = examples_of(self.storage, self.plan, has_prompts=False)
        manifest_as_read = json.loads(manifest_text)  # with values as in the file
        report = report_html(manifest_as_read, examples=examples)
        writers: dict[str, Callable[[Any], object]] = {}
        for name in self._outputs:
            writers[name] = partial(write_output, self.storage, self.plan, name)
        writers[run_names.REPORT] = lambda sink: sink.write(report.encode())
        writers[run_names.MANIFEST] = lambda sink: sink.write(manifest_text.encode())

        with writing(self._path):
            for name in self._end_files:
                if not self._is_there(name):
                    self.storage.put(self.path(name), self.execution_id, writers[name])
                    self._check_is_there(name)
            remove_working_folders(self.storage, self.plan)
            self._remove_leftovers()
            self.storage.create(self.path(run_names.SUCCESS))
            self._check_is_there(run_names.SUCCESS)
        return summary

    def _is_there(self, name: str) -> bool:
        """Whether the folder has a file of this name."""
        return self.storage.stat(self.path(name)) is not None

    def _check_is_there(self, name: str) -> None:
        """Raise OutputNotWritable if the file that was just written is not found under its name.

        In this case, something else has the name, such as a folder.
        """
        if not self._is_there(name):
            raise OutputNotWritable(
                self.path(name), "something with this name is there, and it is not a file"
            )

    def _remove_leftovers(self) -> None:
        """Remove temporary files, and files of row numbers that were written by other attempts at planning.

        Another execution may still run. It no longer needs its temporary file, because its part is already in place.
        """
        # The plan's own file of row numbers stays. Its name contains `plan.reused.name`.
        name_part = "" if self.plan.reused is None else self.plan.reused.name
        numbers_name = os.path.basename(run_names.row_numbers_name(name_part))
        for folder in {self._path, self._parts_path, self.path(run_names.KEYS)}:
            for name in self.storage.names(folder):
                is_leftover = name.startswith((run_names.TEMPORARY_PREFIX, run_names.ROWS_PREFIX))
                if is_leftover and name != numbers_name:
                    self.storage.remove(os.path.join(folder, name))
