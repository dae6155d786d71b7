"""A log is text on a terminal and a JSON object a line elsewhere, whoever wrote the record."""

import ast
import json
import logging
import re
import sys
from typing import Any

from jobs.common.json_log import MAX_EXCEPTION_CHARS, JsonLine
from jobs.common.plain_log import MAX_ARGUMENT_CHARS, PlainLine
from jobs.runs.plans.names import plan_job_id, run_and_shard, shard_job_id
from tests.rq_workers import ROOT, Workers
from worker.logs import _run_fields

RUN = "0123456789abcdef"


def written(name: str, *arguments: Any, plain: bool = True, **options: Any) -> dict[str, Any]:
    """Log one record; return its line."""
    record = logging.getLogger(name).makeRecord(
        name,
        logging.WARNING,
        "file.py",
        1,
        arguments[0],
        arguments[1:],
        options.pop("exc_info", None),
    )
    if plain:
        assert PlainLine().filter(record)
    line = JsonLine({"worker": "w"}, _run_fields).format(record)
    assert line.isascii()
    assert line.isprintable()
    return dict(json.loads(line))


def test_a_worker_under_a_pipe_writes_json_lines_and_nothing_else(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("jobs.complete", "a secret prompt", max_tokens="4")
    log = workers.burst("--name", "w", "--with-scheduler", "--verbose", TOKENMILL_LOG_FORMAT="auto")
    lines = [json.loads(line) for line in log.splitlines()]
    assert {"timestamp", "level", "logger", "event", "worker"} <= set.intersection(*map(set, lines))
    assert {line["worker"] for line in lines} == {"w"}
    (failed,) = [line for line in lines if line["level"] == "warning"]
    assert (failed["job_id"], failed["logger"]) == (job.id, "rq.worker")
    assert "max_tokens arrived as the text" in failed["event"]
    assert failed["timestamp"].endswith("+00:00")
    assert "rq.scheduler" in {line["logger"] for line in lines}
    assert "secret" not in log


def test_two_formats_at_once_stop_the_start(workers: Workers) -> None:
    process = workers.start("--log-format", "%(message)s", TOKENMILL_LOG_FORMAT="json")
    assert process.wait(timeout=60) == 1
    (line,) = [line for line in workers.log(process).splitlines() if "cannot start" in line]
    assert "TOKENMILL_LOG_FORMAT=json, and --log-format" in line


def test_a_record_says_of_which_job_run_and_shard_it_is() -> None:
    job_id = shard_job_id(RUN, 12)
    line = written("rq.worker", "%s: job %s failed: %s", "bulk", job_id, "no")
    assert (line["job_id"], line["run"], line["shard"]) == (job_id, RUN, 12)
    planning = written("rq.worker", "job %s: not carried out yet", plan_job_id(RUN))
    assert (planning["run"], "shard" in planning) == (RUN, False)
    assert written("rq.worker", "job %s: its end (%s)", "mine", "x")["job_id"] == "mine"
    assert written("rq.job", "Job %s: failed to deserialize webhooks", "mine")["job_id"] == "mine"
    assert "job_id" not in written("rq.worker", "gave back %d jobs", 3)
    assert run_and_shard("mine-12") is None


def test_hostile_values_make_one_line_of_printable_text() -> None:
    odd = '\x1b[2J\r\n{"level": "info"}\u202e\x9b\x7f\udc80'
    line = written("rq.worker", "job %s failed: %s", odd, "y" * 100_000)
    assert r"\x1b[2J\r\n" in line["event"]
    assert len(line["event"]) < 2 * MAX_ARGUMENT_CHARS
    assert line["job_id"].isprintable()
    assert odd in written("some.library", odd, plain=False)["event"]
    assert written("rq.worker", "\x1b[32mbulk\x1b[39;49;00m: x")["event"] == "bulk: x"


def test_an_exception_is_told_without_the_values_of_its_variables() -> None:
    def fails() -> None:
        prompt = "a secret prompt"
        raise ValueError("z" * 10_000 + "\n" + str(len(prompt)))

    try:
        fails()
    except ValueError:
        line = written("rq.worker", "it ends", exc_info=sys.exc_info())
    (error,) = line["exception"]
    assert error["exc_type"] == "ValueError"
    assert len(error["exc_value"]) == MAX_EXCEPTION_CHARS
    assert [frame["name"] for frame in error["frames"]][-1] == "fails"
    assert "secret" not in json.dumps(line)


def texts_of_the_code() -> set[str]:
    """Every text in the code of worker and jobs, with its parts on several lines as one."""
    texts = set()
    for package in ("worker", "jobs"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
    return texts


def test_each_line_that_people_on_call_are_told_to_search_for_stands_in_the_code() -> None:
    page = (ROOT / "docs" / "recovery.md").read_text()
    table = page.partition("## Log lines to search for")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|.*$", table, re.MULTILINE)
    ends = re.findall(r"; `(.+?)` ends it", table)
    lines = [line for row in rows for line in re.findall(r"`(.+?)`", row)]
    assert len(lines) > 15
    assert len(ends) == 4
    texts = texts_of_the_code()
    assert [line for line in (*lines, *ends) if not any(line in text for text in texts)] == []
