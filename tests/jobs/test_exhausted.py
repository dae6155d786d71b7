"""What a machine has no more of is nobody's fault: whoever needs it raises that, and no row gets an error."""

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from engine import InvalidSampling, SamplingParams
from engine.structured.grammars import Grammars
from jobs.context.checks import Checks, RepairOptions
from jobs.context.shared_files import CHILDREN, DECODERS
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts import picture_source
from jobs.prompts.pictures import decode
from jobs.prompts.template_texts import JinjaTexts
from sandbox import Pool, process
from tests.e2e.conftest import MODEL
from tests.jobs.answering import FakeCompletion, opened_task
from tests.jobs.local_runs import Runs
from tests.picture_files import RED, picture
from worker.io_thread.faults import is_fault

ROOT = Path(__file__).parents[2]
LACKING = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT]
END = frozenset({0})


def compile_form() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    forms = Grammars(tokenizer, tokenizer.get_vocab_size(), END)
    try:
        forms.matchers(SamplingParams(structured_outputs={"choice": ["yes", "no"]}), END)
    finally:
        forms.close()


def check_answer() -> None:
    Checks().outcome(RepairOptions(check={"regex": "a+"}), None, "a")


def decode_picture() -> None:
    decode(picture(RED), "a picture", 1 << 20)


def read_template() -> None:
    JinjaTexts("{{ prompt }}")


@pytest.fixture(autouse=True)
def no_children() -> None:
    """Children of earlier tests would serve these."""
    for pool in (CHILDREN, DECODERS):
        while pool._idle:
            pool._idle.pop().close()


@pytest.mark.parametrize("number", LACKING)
@pytest.mark.parametrize("use", [compile_form, check_answer, decode_picture, read_template])
def test_a_child_that_cannot_begin_for_lack_of_something_is_the_workers_fault(
    use: Callable[[], None], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(process.subprocess, "Popen", lack)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as raised:
        use()
    assert is_fault(raised.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "lacked"),
    [
        ({"end": "memory"}, MemoryError),
        ({"end": "raised", "error": "OSError: ...", "errno": errno.ENFILE}, OSError),
    ],
)
def test_a_child_whose_imports_lack_something_is_the_workers_fault(
    end: dict[str, Any], lacked: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process.Child, "_exchange", lambda child, *message, **more: (end, bytearray())
    )
    pool = Pool()
    with pytest.raises(lacked) as raised:
        pool.call(lambda child: child.ask("tests.sandbox.tasks:echo", {}, process.Limits(10.0)))
    assert is_fault(raised.value)


def test_a_thread_that_cannot_begin_is_the_workers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack(*args: Any) -> Any:
        raise RuntimeError("can't start new thread")  # what Python raises for EAGAIN

    monkeypatch.setattr(threading, "_start_new_thread", lack)
    monkeypatch.setattr(threading, "_start_joinable_thread", lack, raising=False)  # of Python 3.13
    with pytest.raises(RuntimeError) as raised:
        threading.Thread(target=print).start()
    assert is_fault(raised.value)
    assert not is_fault(RuntimeError("of a job's own"))


def test_a_process_that_is_not_allowed_is_no_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(process.subprocess, "Popen", refuse)
    with pytest.raises(InvalidSampling, match="no process for it starts"):
        compile_form()


def test_a_shard_that_lacks_memory_or_descriptors_for_its_pictures_gives_no_row_an_error(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(picture(RED))
    pq.write_table(pa.table({"prompt": ["a"], "image": ["a.png"]}), runs.source)
    runs.plan(image_column="image")
    (job,) = runs.jobs
    open_input = Storage.open_input

    def lack_descriptors(storage: Storage, path: str) -> Any:
        if path.endswith(".png"):
            raise OSError(errno.EMFILE, "too many open files")
        return open_input(storage, path)

    def lack_memory(value: Any) -> Any:
        raise pa.ArrowMemoryError("malloc failed")

    monkeypatch.setattr(Storage, "open_input", lack_descriptors)
    with pytest.raises(OSError, match="too many") as raised:
        opened_task(runs.context(), job.func_name, job.args)
    assert is_fault(raised.value)
    monkeypatch.setattr(picture_source, "_pictures_of", lack_memory)
    with pytest.raises(MemoryError) as short:
        opened_task(runs.context(), job.func_name, job.args)
    assert is_fault(short.value)


def test_a_journal_that_cannot_be_opened_for_lack_of_descriptors_is_not_passed_over(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.write(["a", "b"])
    runs.plan()
    (job,) = runs.jobs
    task = opened_task(runs.context(), job.func_name, job.args)
    list(task.requests())
    task.deliver(0, [FakeCompletion("A")])
    write = task.keep({})
    assert write is not None
    write()
    open_input = Storage.open_input

    def lack(storage: Storage, path: str) -> Any:
        if "_journal" in path:
            raise OSError(errno.EMFILE, "too many open files")
        return open_input(storage, path)

    monkeypatch.setattr(Storage, "open_input", lack)
    with pytest.raises(OSError, match="too many"):
        opened_task(runs.context(), job.func_name, job.args)


def test_one_list_says_what_a_machine_may_lack() -> None:
    numbers = re.compile(r"errno\.(EMFILE|ENFILE|ENOMEM|ENOSPC|EDQUOT|EAGAIN)\b")
    holders = [
        str(path.relative_to(ROOT))
        for room in ("jobs", "worker", "engine", "sandbox")
        for path in (ROOT / room).rglob("*.py")
        if numbers.search(path.read_text(encoding="utf-8"))
    ]
    assert holders == ["sandbox/exhausted.py"]
