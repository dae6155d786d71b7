"""What looks at an answer: functions, patterns, schemas, in processes of their own."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.context import JobContext
from jobs.context import checks as checks_module
from jobs.context.checks import Checks, RepairOptions
from jobs.context.own_sources import hash_of, own_files
from jobs.errors import InvalidJob
from jobs.parquet.asks.batch_lines import BatchLines
from jobs.parquet.prompts.prompt_source import Row
from jobs.runs.plans.spec import RunSpec
from sandbox.recent import MAX_CHARS, MAX_TEXTS
from tests.jobs.answering import keyed
from tests.jobs.checking import DIES, FUNCTION, HANGS, LIMIT_S, RAISES

pytestmark = pytest.mark.processes


def test_a_function_gets_row_and_answer_and_says_what_is_wrong(checks: Checks) -> None:
    options = RepairOptions(check={"function": FUNCTION})
    assert checks.outcome(options, {"prompt": "x"}, "12") is None
    assert (
        checks.outcome(options, {"prompt": "naïve"}, "11")
        == "11 is odd, and naïve wants an even one"
    )
    assert checks.outcome(options, {}, "silent") == "the check gave no reason"
    assert checks.outcome(options, {}, "true") == (
        "the check returned bool, expected None or the reason as a text"
    )
    assert len(checks.outcome(options, {}, "long") or "") < 3_000
    assert checks.outcome(options, {}, "prints") is None, "what it prints is none of its replies"


@pytest.mark.parametrize(
    ("check", "text", "says"),
    [
        ({"function": RAISES}, "x", "the check raised ValueError: no x"),
        ({"function": RAISES}, "exit", "the check raised SystemExit: 3"),
        ({"function": DIES}, "x", "the check ended its process with -9"),
        ({"function": HANGS}, "x", f"the check went on for more than {LIMIT_S} s"),
        ({"regex": "(a+)+b"}, "a" * 60, f"the check went on for more than {LIMIT_S} s"),
        ({"json": {}}, "[" * 200_000, "it is not JSON: maximum recursion"),
        ({"json": {}}, '{"a": NaN}', "it is not JSON: NaN is no value of JSON"),
        (
            {"json": {"$ref": "http://localhost:1/schema"}},
            "1",
            "Unresolvable: http://localhost:1/schema",
        ),
    ],
)
def test_a_check_that_fails_fails_the_attempt_and_the_next_is_checked(
    checks: Checks, check: dict[str, Any], text: str, says: str
) -> None:
    options = RepairOptions(check=check)
    assert says in (checks.outcome(options, {}, text) or "")
    assert checks.outcome(RepairOptions(check={"regex": "é+"}), {}, "éé") is None


def test_processes_end_with_the_one_that_asked() -> None:
    checks, options = Checks(), RepairOptions(check={"regex": "a"})
    assert checks.outcome(options, {}, "a") is None
    (child,) = checks._pool._idle
    checks.close()
    assert not child.is_alive


SLOW = [{"json": {"allOf": [True] * 170_000}}, {"regex": "(?:a|b)*" * 130_000}]  # of 1 MiB each


@pytest.mark.parametrize("check", SLOW, ids=["schema", "pattern"])
def test_what_takes_long_to_compile_is_refused(
    checks: Checks, check: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "COMPILE_LIMIT_S", 0.2)
    with pytest.raises(
        InvalidJob, match=r"went on for more than 0\.2 s before it could check anything"
    ):
        checks.outcome(RepairOptions(check=check), {}, "1")


def test_others_are_checked_beside_what_takes_long_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks_module, "COMPILE_LIMIT_S", 600.0)
    checks, ended = Checks(), SimpleQueue[Exception]()

    def ask() -> None:
        try:
            checks.prepare(RepairOptions(check=SLOW[0]))
        except InvalidJob as error:
            ended.put(error)

    slow = threading.Thread(target=ask)
    slow.start()
    assert checks.outcome(RepairOptions(check={"regex": "b"}), {}, "b") is None
    assert ended.empty()
    checks._pool.close(kill=True)
    slow.join()
    assert "ended its process with -9" in str(ended.get())


def test_a_function_whose_file_changed_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source, options = tmp_path / "own_checks.py", RepairOptions({"function": "own_checks.check"})
    source.write_text("def check(row, text):\n    return 'first'\n")
    found = Checks({"own_checks.check"})
    try:
        with (
            found._pool.lent() as one,
            found._pool.lent() as other,
        ):  # two that will have the first source
            for child in (one, other):
                found._reply(child, options, {})
        before = found.version(options)
        assert found.outcome(options, {}, "a") == "first"
        source.write_text("PREFIX = 'the second'\ndef check(row, text):\n    return PREFIX\n")
        assert [found.outcome(options, {}, "a") for _ in range(3)] == ["the second"] * 3
        changed = found.version(options)
        assert changed != before
        source.write_text("PREFIX = 'the third one'\ndef check(row, text):\n    return PREFIX\n")
        assert found.version(options) not in (before, changed), (
            "what the function reads of its file counts too"
        )
    finally:
        found.close()


HELPERS = {
    "beside": ("own.py", "helper.py", "import json\nfrom helper import say"),
    "in a package": ("kit/own.py", "kit/helper.py", "from .helper import say"),
    "in a subpackage": (
        "kit/own.py",
        "kit/parts/helper.py",
        "def check(r, t):\n    from kit.parts import helper",
    ),
    "by way of a package": ("kit/own.py", "kit/parts/__init__.py", "import kit.parts as parts"),
    "two steps away": ("own.py", "helper.py", "import between"),
}


@pytest.mark.parametrize(("path", "helper", "imports"), HELPERS.values(), ids=HELPERS)
def test_what_a_function_imports_of_its_own_package_is_part_of_its_version(
    tmp_path: Path, path: str, helper: str, imports: str
) -> None:
    files = {
        path: imports,
        helper: "",
        "between.py": "import helper",
        "kit/__init__.py": "",
        "kit/parts/more.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    module = path.removesuffix(".py").replace("/", ".")
    found = own_files(module, tmp_path / path)
    assert tmp_path / helper in found
    assert tmp_path / "kit/parts/more.py" not in found
    before = hash_of(found)
    (tmp_path / helper).write_text("LIMIT = 3")
    assert hash_of(found) != before


def test_a_function_whose_helper_changed_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    helper, options = tmp_path / "aid.py", RepairOptions({"function": "aided_checks.check"})
    (tmp_path / "aided_checks.py").write_text(
        "from aid import SAY\ndef check(row, text):\n    return SAY\n"
    )
    helper.write_text("SAY = 'first'\n")
    found = Checks({"aided_checks.check"})
    try:
        before = found.version(options)
        assert found.outcome(options, {}, "a") == "first"
        helper.write_text("SAY = 'the second'\n")
        assert found.outcome(options, {}, "a") == "the second"
        assert found.version(options) != before
    finally:
        found.close()


def test_the_key_of_a_batch_line_has_the_version_of_its_function(
    context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(["one", "one", "two"])
    monkeypatch.setattr(Checks, "version", lambda self, options: next(versions))

    def key(check: object) -> bytes:
        spec = RunSpec.from_arguments("in.jsonl", "out", input_format="openai-batch")
        plan = SimpleNamespace(spec=spec, model=SimpleNamespace(adapters=()))
        ask = keyed(BatchLines(plan, replace(context, checks=Checks())), spec)  # type: ignore[arg-type]
        return ask.key_of(
            Row(json.dumps({"custom_id": "a", "body": {"prompt": "b", "check": check}}))
        )

    first, same, other = (key({"function": "m.f"}) for _ in range(3))
    assert first == same != other
    assert key({"regex": "a"}) == key({"regex": "a"})


def test_distinct_checks_are_remembered_up_to_a_bound_and_none_pays_for_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a bound the child's memory would end some day, at a check that needs little."""
    monkeypatch.setattr(
        "jobs.context.checks.COMPILE_LIMIT_S", 60.0
    )  # a loaded machine ends no child here
    checks = Checks(limit_s=60.0)
    first_child = None
    for number in range(80):
        check = {"json": {"const": str(number) * 500_000}}
        assert checks.outcome(RepairOptions(check=check), {}, '"1"') is not None
        (child,) = checks._pool._idle
        first_child = first_child or child
        assert child is first_child
    assert child.notes.num_chars <= MAX_CHARS
    for number in range(MAX_TEXTS + 10):
        assert (
            checks.outcome(RepairOptions(check={"regex": f"a{number}"}), {}, f"a{number}") is None
        )
    assert len(child.notes) == MAX_TEXTS
    checks.close()
