"""A log is text on a terminal and a JSON object a line elsewhere, whoever wrote the record."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jobs.common.json_log import MAX_EXCEPTION_CHARS, JsonLine
from jobs.common.log_format import is_json
from jobs.common.plain_log import MAX_ARGUMENT_CHARS, PlainLine
from jobs.runs.plans.names import run_and_shard, shard_job_id
from tests.rq_workers import Workers
from tokenmill_dashboard.serve import NotServed, start_log
from worker.errors import SettingsError
from worker.logs import LogStyle, _more_of
from worker.settings import name_variables

RUN = "0123456789abcdef"


def lines_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def written(name: str, *arguments: Any, plain: bool = True, **options: Any) -> dict[str, Any]:
    """Log one record; return its line."""
    record = logging.getLogger(name).makeRecord(
        name, logging.WARNING, "file.py", 1, arguments[0], arguments[1:], options.pop("exc_info", None)
    )
    if plain:
        assert PlainLine().filter(record)
    line = JsonLine({"worker": "w"}, _more_of).format(record)
    assert line.isascii()
    assert line.isprintable()
    return dict(json.loads(line))


def test_a_worker_under_a_pipe_writes_json_lines_and_nothing_else(workers: Workers) -> None:
    job = workers.queue("bulk").enqueue("jobs.complete", "a secret prompt", max_tokens="4")
    log = workers.burst("--name", "w", "--with-scheduler", TOKENMILL_LOG_FORMAT="auto")
    lines = lines_of(log)
    assert {"timestamp", "level", "logger", "event", "worker"} <= set.intersection(*map(set, lines))
    assert {line["worker"] for line in lines} == {"w"}
    (failed,) = [line for line in lines if line["level"] == "warning"]
    assert (failed["job_id"], failed["logger"]) == (job.id, "rq.worker")
    assert "max_tokens arrived as the text" in failed["event"]
    assert failed["timestamp"].endswith("+00:00")
    assert "rq.scheduler" in {line["logger"] for line in lines}
    assert "secret" not in log


@pytest.mark.parametrize(
    ("wanted", "flags", "says"),
    [
        ("yaml", (), "TOKENMILL_LOG_FORMAT='yaml': expected text, json, or auto"),
        ("json", ("--log-format", "%(message)s"), "TOKENMILL_LOG_FORMAT=json, and --log-format"),
    ],
)
def test_what_cannot_be_meant_stops_the_start(
    workers: Workers, wanted: str, flags: tuple[str, ...], says: str
) -> None:
    process = workers.start(*flags, TOKENMILL_LOG_FORMAT=wanted)
    assert process.wait(timeout=60) == 1
    (line,) = [line for line in workers.log(process).splitlines() if "cannot start" in line]
    assert says in line


def test_a_format_of_rqs_flags_is_one_of_text(workers: Workers) -> None:
    log = workers.burst("--log-format", "mine: %(message)s", TOKENMILL_LOG_FORMAT="auto")
    assert all(line.startswith("mine: ") for line in log.splitlines())


def test_a_stream_decides_where_nobody_does() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    streams = (Terminal(), io.StringIO())
    assert [is_json("auto", each) for each in streams] == [False, True]
    assert [is_json("json", each) for each in streams] == [True, True]
    assert [is_json("text", each) for each in streams] == [False, False]


def test_a_record_says_of_which_job_run_and_shard_it_is() -> None:
    job_id = shard_job_id(RUN, 12)
    line = written("rq.worker", "%s: job %s failed: %s", "bulk", job_id, "no")
    assert (line["job_id"], line["run"], line["shard"]) == (job_id, RUN, 12)
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


def noted() -> Exception:
    error = ValueError("noted")
    error.add_note("n" * 10**6)
    return error


def chained() -> Exception:
    error = ValueError("0")
    for number in range(1, 500):
        try:
            raise ValueError(str(number)) from error
        except ValueError as later:
            error = later
    return error


@pytest.mark.parametrize(
    "error", [noted(), ExceptionGroup("all", [noted()] * 3), chained()], ids=["notes", "a group", "a chain"]
)
def test_no_exception_makes_a_line_long(error: Exception) -> None:
    line = written("rq.worker", "it failed", exc_info=(type(error), error, None))
    assert str(error) == line["exception"][0]["exc_value"]
    assert len(json.dumps(line)) < 3 * MAX_EXCEPTION_CHARS


@pytest.fixture
def bare_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """To call in a test: takes all handlers away, pytest's too, and levels that other tests have set; all are
    put back."""
    loggers = [logging.getLogger(name) for name in (None, "rq.worker", "engine", "uvicorn", "uvicorn.error")]
    levels = [logger.level for logger in loggers]

    def strip() -> None:
        for logger in loggers:
            monkeypatch.setattr(logger, "handlers", [])
        for logger in loggers[1:]:
            logger.setLevel(logging.NOTSET)
        monkeypatch.setattr(logging, "captureWarnings", lambda on: None)

    yield strip
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_libraries_come_out_alike_and_settings_by_their_variables(
    bare_logging: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bare_logging()
    LogStyle("json").start("w")
    name_variables(logging.getLogger("engine"))
    logging.getLogger("engine.run").warning("lower max_num_seqs")
    logging.getLogger("urllib3").error("no max_num_seqs here")
    out, err = capsys.readouterr()
    assert [line["event"] for line in lines_of(out)] == ["lower TOKENMILL_MAX_NUM_SEQS"]
    assert [line["event"] for line in lines_of(err)] == ["no max_num_seqs here"]


def test_logging_that_a_program_has_set_up_is_left_alone(
    bare_logging: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    bare_logging()
    logging.getLogger().addHandler(logging.StreamHandler(stream))
    LogStyle("json").start("w")
    logging.getLogger("engine").warning("here")
    assert (stream.getvalue(), capsys.readouterr().out) == ("here\n", "")


def test_without_structlog_the_log_is_text_unless_json_was_asked_for(
    bare_logging: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "structlog", None)
    monkeypatch.delitem(sys.modules, "jobs.common.json_log")
    bare_logging()
    LogStyle("auto").start("w")
    assert "structlog is not installed" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="needs structlog"):
        LogStyle("json").start("w")


def test_the_dashboards_log_follows_the_same_variable(
    bare_logging: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_LOG_FORMAT", "text")
    bare_logging()
    assert not start_log()
    monkeypatch.setenv("TOKENMILL_LOG_FORMAT", "yaml")
    with pytest.raises(NotServed, match="TOKENMILL_LOG_FORMAT='yaml'"):
        start_log()
    monkeypatch.delenv("TOKENMILL_LOG_FORMAT")
    assert start_log()
    logging.getLogger("uvicorn.error").warning("odd request")
    (line,) = lines_of(capsys.readouterr().out)
    assert (line["event"], line["logger"]) == ("odd request", "uvicorn.error")
