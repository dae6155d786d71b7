"""Requests on their way into the engine: tokenizing holds up nobody else, and keeps a lane's order."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import pytest
from rq.job import JobStatus

from engine import Completion, InvalidPrompt, SamplingParams
from jobs.tasks import Request
from tests.picture_files import picture
from tests.rq_workers import Workers, text_of
from tests.worker.fake_engine import FakeEngine
from worker.engine_thread.engine_loop import EngineLoop
from worker.engine_thread.intake import (
    MAX_MEDIUM_CHARS,
    MAX_SHORT_CHARS,
    MAX_TURN_CHARS,
    OVERHEAD_CHARS,
    PICTURES_AHEAD,
    URGENT_TURNS,
)
from worker.engine_thread.orders import Abort, Add, Halt, Stepped

HIGH, BULK = 0, 1
MEDIUM_CHARS, LONG_CHARS = MAX_SHORT_CHARS + 1, MAX_MEDIUM_CHARS + 1
WAIT_S = 20  # for what comes at once unless something is broken


@dataclass(frozen=True)
class Tokenized:
    prompt: str


@dataclass
class TokenizingEngine(FakeEngine):
    """Its tokenizer stops at the prompts that are held, until they are let go, and raises where told to."""

    held: dict[str, threading.Event] = field(default_factory=dict)
    raised: dict[str, Exception] = field(default_factory=dict)
    begun: SimpleQueue[str] = field(default_factory=SimpleQueue)
    ended: SimpleQueue[str] = field(default_factory=SimpleQueue)
    tokenized: list[str] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    lanes: dict[str, int] = field(default_factory=dict)
    forms: dict[str, Future[None]] = field(default_factory=lambda: defaultdict(Future))

    def _tokenize(self, prompt: str) -> Tokenized:
        name = prompt.strip(".")
        self.begun.put(name)
        if name in self.held:
            assert self.held[name].wait(WAIT_S)
        if name in self.raised:
            raise self.raised[name]
        self.tokenized.append(name)
        self.ended.put(name)
        return Tokenized(prompt)

    def prepare_grammar(self, params: Any) -> Future[None] | None:  # type: ignore[override]
        form = params.structured_outputs
        return None if form is None else self.forms[form.regex]

    def prepare(self, prompt: Any, params: Any = None) -> Any:
        return self._tokenize(prompt if isinstance(prompt, str) else prompt[0])

    def chat_token_ids(self, messages: list[dict[str, str]], **options: Any) -> Any:
        return messages[0]["content"]

    def add(
        self, request_id: str, prompt: Any, params: SamplingParams, *, lane: int = 0, **_: Any
    ) -> None:
        ready = prompt if isinstance(prompt, Tokenized) else self._tokenize(prompt)
        self.entered.append(request_id)
        self.lanes[request_id] = lane
        super().add(request_id, ready.prompt, params, lane=lane)


class Loop:
    """An engine's loop in a thread of its own, as in a worker."""

    def __init__(self) -> None:
        self.engine = TokenizingEngine(max_num_seqs=4, step_s=0.0)
        self.orders: SimpleQueue[Any] = SimpleQueue()
        self.reports: SimpleQueue[Any] = SimpleQueue()
        self.loop = EngineLoop(cast(Any, self.engine), self.orders, self.reports.put)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def hold(self, *names: str) -> None:
        self.engine.held.update({name: threading.Event() for name in names})

    def let_go(self, *names: str) -> None:
        for name in names or list(self.engine.held):
            self.engine.held[name].set()

    def send(
        self, name: str, lane: int, chars: int = 0, chat: bool = False, **sampling: Any
    ) -> None:
        """Order a completion of `name`, a prompt of so many characters; its request has the same name."""
        prompt = name.ljust(chars, ".")
        messages = [{"role": "user", "content": prompt}] if chat else None
        request = Request(None if chat else prompt, messages, {"max_tokens": 1, **sampling})
        self.orders.put(Add(name, request, lane))

    def wait_for(self, *names: str) -> dict[str, Completion]:
        """What came of the requests, which are the next ones that end."""
        done: dict[str, Completion] = {}
        while len(done) < len(names):
            report = self.reports.get(timeout=WAIT_S)
            assert isinstance(report, Stepped), report
            done.update((completion.request_id, completion) for completion in report.completions)
        assert set(done) == set(names)
        return done

    def halt(self) -> None:
        self.orders.put(Halt())
        if self._thread is not None:
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive(), "the loop did not end"


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.let_go()
    made.halt()


def send_picture(loop: Loop, name: str, lane: int, file: bytes) -> None:
    parts = [{"type": "text", "text": name}, {"type": "image", "image": file}]
    loop.orders.put(Add(name, Request(parts, None, {"max_tokens": 1}), lane))


@pytest.mark.processes
def test_pictures_stay_files_until_those_before_them_run_and_texts_go_on(loop: Loop) -> None:
    loop.engine.max_num_seqs = 0
    names = numbered("picture", PICTURES_AHEAD + 3)
    for name in names:
        send_picture(loop, name, BULK, picture())
    loop.send("text", BULK)
    send_picture(loop, "urgent", HIGH, picture())
    loop.start()
    ended = [loop.engine.ended.get(timeout=WAIT_S) for _ in range(PICTURES_AHEAD + 2)]
    assert set(ended) == {*names[:PICTURES_AHEAD], "text", "urgent"}
    loop.orders.put(Abort(names[:1]))
    assert loop.engine.ended.get(timeout=WAIT_S) == names[PICTURES_AHEAD]
    send_picture(loop, "broken", BULK, b"")
    loop.engine.max_num_seqs = 4
    done = loop.wait_for(*names[1:], "text", "urgent", "broken")
    assert [name for name, each in done.items() if each.error] == ["broken"]
    assert loop.loop._intake._decoded == {}


def numbered(kind: str, count: int) -> list[str]:
    return [f"{kind}{number}" for number in range(count)]


@pytest.mark.parametrize("chars", [MEDIUM_CHARS, LONG_CHARS])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_an_urgent_prompt_is_answered_while_forty_of_another_lane_are_tokenized(
    loop: Loop, chars: int, chat: bool
) -> None:
    bulk = numbered("bulk", 40)
    loop.hold(*bulk)
    loop.start()
    for name in bulk:
        loop.send(name, BULK, chars, chat)
    loop.engine.begun.get(timeout=WAIT_S)
    loop.send("urgent", HIGH)
    assert loop.wait_for("urgent")["urgent"].text == "echo:urgent"
    assert loop.engine.tokenized == ["urgent"]
    loop.let_go()
    loop.wait_for(*bulk)
    assert loop.engine.entered == ["urgent", *bulk]


def test_requests_of_a_lane_enter_the_engine_in_the_order_they_came(loop: Loop) -> None:
    """Whatever their lengths and whichever is tokenized first."""
    lane = ["long", "medium", "short", "other"]
    loop.hold(*lane)
    loop.let_go("medium", "short")
    loop.start()
    for name, chars in zip(lane, (LONG_CHARS, MEDIUM_CHARS, 0, MEDIUM_CHARS), strict=True):
        loop.send(name, BULK, chars)
    assert loop.engine.ended.get(timeout=WAIT_S) == "medium"
    loop.send("urgent", HIGH)
    loop.wait_for("urgent")
    assert loop.engine.entered == ["urgent"]
    loop.let_go("long", "other")
    loop.wait_for(*lane)
    assert loop.engine.entered == ["urgent", *lane]
    assert loop.engine.lanes == {"urgent": HIGH, **dict.fromkeys(lane, BULK)}


def test_long_sampling_values_hold_nobody_up_wherever_they_stand_among_the_others(
    loop: Loop,
) -> None:
    loop.hold("long")
    loop.start()
    loop.send("long", BULK, allowed_token_ids=list(range(MEDIUM_CHARS)))
    assert loop.engine.begun.get(timeout=WAIT_S) == "long"
    loop.send("urgent", HIGH)
    loop.wait_for("urgent")
    loop.let_go("long")
    loop.wait_for("long")


def test_who_waits_for_a_form_is_overtaken_by_the_others_of_its_lane(loop: Loop) -> None:
    """Those of one form keep their order, and those of a form that is compiled the lane's."""
    loop.start()
    loop.engine.forms["known"].set_result(None)
    for name in ("first", "second"):
        loop.send(name, BULK, structured_outputs={"regex": "new"})
    loop.send("known", BULK, structured_outputs={"regex": "known"})
    loop.send("medium", BULK, MEDIUM_CHARS)
    loop.send("short", BULK)
    loop.wait_for("known", "medium", "short")
    loop.engine.forms["new"].set_result(None)
    loop.wait_for("first", "second")
    assert loop.engine.entered == ["known", "medium", "short", "first", "second"]


def test_a_request_is_aborted_while_it_is_tokenized_or_waits_for_that(loop: Loop) -> None:
    loop.hold("begun")
    loop.start()
    loop.send("begun", BULK, LONG_CHARS)
    assert loop.engine.begun.get(timeout=WAIT_S) == "begun"
    loop.send("waiting", BULK, LONG_CHARS)
    loop.send("short", BULK)
    loop.send("last", BULK, LONG_CHARS)
    loop.orders.put(Abort(["begun", "waiting", "short", "unknown"]))
    loop.send("urgent", HIGH)
    loop.wait_for("urgent")
    loop.let_go()
    loop.wait_for("last")
    assert loop.engine.entered == ["urgent", "last"]
    assert "waiting" not in loop.engine.tokenized


def test_what_tokenizing_raises_fails_that_request_alone(loop: Loop) -> None:
    loop.engine.raised = {
        "refused": InvalidPrompt("no valid Unicode"),
        "broken": RuntimeError("the tokenizer is at a loss"),
    }
    loop.start()
    names = ["before", "refused", "broken", "after"]
    for name in names:
        loop.send(name, BULK, MEDIUM_CHARS)
    done = loop.wait_for(*names)
    assert done["refused"].error == "no valid Unicode"
    assert done["broken"].error == "RuntimeError: the tokenizer is at a loss"
    assert loop.engine.entered == ["before", "after"]


def test_a_turn_tokenizes_so_much_and_urgent_lanes_first(loop: Loop) -> None:
    chars = 1000
    bulk, urgent = numbered("bulk", 200), numbered("urgent", 100)
    for name in bulk:
        loop.send(name, BULK, chars)
    loop.loop.turn()
    most = MAX_TURN_CHARS // (chars + OVERHEAD_CHARS) + 1
    assert loop.engine.entered == bulk[:most]
    assert loop.engine.started == bulk[: loop.engine.max_num_seqs], (
        "they are in the step of the turn that takes them"
    )
    for name in urgent:
        loop.send(name, HIGH, chars)
    loop.loop.turn()
    assert loop.engine.entered[most:] == [bulk[most], *urgent[:most]]


def test_a_worker_answers_prompts_of_every_length(workers: Workers) -> None:
    prompts = ["x" * chars for chars in (1, MAX_SHORT_CHARS + 1, MAX_MEDIUM_CHARS + 1, 1 << 20)]
    queue = workers.queue("bulk")
    jobs = [queue.enqueue("jobs.complete", prompt, max_tokens=1) for prompt in prompts]
    jobs.append(
        queue.enqueue(
            "jobs.chat", [{"role": "user", "content": "y" * (MAX_MEDIUM_CHARS + 1)}], max_tokens=1
        )
    )
    workers.burst()
    assert [job.get_status() for job in jobs] == [JobStatus.FINISHED] * len(jobs)
    for job, prompt in zip(jobs[:-1], prompts, strict=True):
        assert text_of(workers.result(job)) == f"echo:{prompt}"


def test_a_lane_that_waits_to_be_tokenized_gets_one_turn_in_twenty(loop: Loop) -> None:
    """However many wait in it, an urgent prompt is next."""
    loop.hold("begun")
    loop.start()
    loop.send("begun", HIGH, LONG_CHARS)
    assert loop.engine.begun.get(timeout=WAIT_S) == "begun"
    for name in numbered("bulk", 3):
        loop.send(name, BULK, LONG_CHARS)
    for name in numbered("high", URGENT_TURNS + 5):
        loop.send(name, HIGH, LONG_CHARS)
    loop.send("all arrived", BULK + 1)  # a lane of its own, in which nothing waits
    loop.wait_for("all arrived")
    loop.engine.tokenized.clear()
    loop.let_go()
    loop.wait_for("begun", *numbered("bulk", 3), *numbered("high", URGENT_TURNS + 5))
    order = [name.rstrip("0123456789") for name in loop.engine.tokenized]
    assert order[1:3] in (["bulk", "high"], ["high", "bulk"])
    assert order[3 : URGENT_TURNS + 1] == ["high"] * (URGENT_TURNS - 2)
    assert order[URGENT_TURNS + 1 : URGENT_TURNS + 3].count("bulk") == 1
