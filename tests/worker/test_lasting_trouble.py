"""A trouble that lasts is one line of the log, however often it is met, and its end is another."""

import logging
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.worker.whole_worker import TURN_S, WholeWorker
from worker.io_thread.reporter import SLOW_S
from worker.logs import OVER_S, LastingTrouble
from worker.store.client import new_client
from worker.store.redis_clock import SKEW_S, RedisClock

LOG = logging.getLogger("lasting")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.moment = 0.0

    def __call__(self) -> float:
        return self.moment


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def trouble(clock: Clock) -> LastingTrouble:
    return LastingTrouble(LOG, "all is well again", logging.WARNING, clock)


@pytest.fixture
def whole(redis: Redis, caplog: pytest.LogCaptureFixture) -> Iterator[WholeWorker]:
    caplog.set_level(logging.INFO)
    worker = WholeWorker(redis, "/")
    yield worker
    worker.close()


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_trouble_of_each_kind_is_logged_once_while_it_lasts_and_once_at_its_end(
    trouble: LastingTrouble, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(211):
        trouble.note("full", "Redis is full: %d", 1)
        trouble.note("away", "Redis is away")
        clock.moment += 1
        trouble.note_absence()
    assert caplog.messages == ["Redis is full: 1", "Redis is away"]
    clock.moment += OVER_S
    trouble.note_absence()
    trouble.note_absence()
    assert caplog.messages[2:] == ["all is well again (seen 422 times in 210 s)"]


def test_a_trouble_that_nobody_saw_pass_is_logged_anew_when_it_comes_back_late(
    trouble: LastingTrouble, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trouble.note("deaf", "cannot listen")
    clock.moment += OVER_S
    trouble.note("deaf", "cannot listen")
    assert caplog.messages == [
        "cannot listen",
        "all is well again (seen 1 times in 0 s)",
        "cannot listen",
    ]


def test_a_proven_end_is_logged_at_once_unless_the_trouble_comes_and_goes(
    trouble: LastingTrouble, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(10):
        trouble.note("away", "Redis is away")
        clock.moment += 1
        trouble.note_end()
    over = "all is well again (seen 1 times in 0 s)"
    assert caplog.messages == ["Redis is away", over, "Redis is away"]
    assert trouble.lasts
    clock.moment += OVER_S
    trouble.note_end()
    assert caplog.messages[3:] == ["all is well again (seen 9 times in 8 s)"]
    clock.moment += OVER_S
    trouble.note("away", "Redis is away")
    trouble.note_end()
    assert caplog.messages[4:] == ["Redis is away", over]
    assert not trouble.lasts


def test_the_first_answer_after_an_outage_is_logged_at_once(
    whole: WholeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RedisConnectionError("gone")

    def sync(clock: RedisClock, client: Redis) -> None:
        whole.tally.count_reply(0.001)

    with monkeypatch.context() as patch:
        patch.setattr(whole.runner, "renew", fail)
        assert whole.turn()
    assert "Redis does not answer" in whole.io.warning
    monkeypatch.setattr(RedisClock, "sync", sync)
    assert whole.turn()
    assert len(lines(caplog, "Redis answers again")) == 1
    assert whole.io.warning == ""


@pytest.mark.parametrize(
    ("error", "over"),
    [
        (RedisTimeoutError("slow"), "Redis answers again"),
        (RedisConnectionError("gone"), "Redis answers again"),
        (OutOfMemoryError("full"), "Redis takes all commands again"),
    ],
)
def test_an_outage_of_redis_is_two_lines_of_the_log(
    whole: WholeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    over: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    assert whole.turn()
    with monkeypatch.context() as patch:
        patch.setattr(whole.runner, "renew", fail)
        assert all(whole.turn() for _ in range(20))
    told = lines(caplog, "trying again until that is over")
    assert len(told) == 1
    assert type(error).__name__ in told[0]
    assert "Redis does not answer, or does not take all" in whole.io.warning
    assert all(whole.turn() for _ in range(1 + int(OVER_S / TURN_S) + 1))
    assert len(lines(caplog, over)) == 1
    assert whole.io.warning == ""


def test_a_wrong_clock_is_two_lines_of_the_log(
    whole: WholeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RedisClock, "sync", lambda clock, _: setattr(clock, "ahead_s", SKEW_S + 1))
        assert all(whole.turn() for _ in range(10))
    assert len(lines(caplog, "this machine's clock is 4 s ahead")) == 1
    assert all(whole.turn() for _ in range(1 + int(OVER_S / TURN_S) + 1))
    assert len(lines(caplog, "agrees with Redis' again")) == 1


def test_a_slow_redis_is_two_lines_of_the_log(
    whole: WholeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        whole.tally.count_reply(SLOW_S + 1)
        whole.tally.count_reply(0.001)
        assert whole.turn()
    assert len(lines(caplog, "Redis took 2.0 s to answer")) == 1
    assert all(whole.turn() for _ in range(1 + int(OVER_S / TURN_S) + 1))
    assert len(lines(caplog, "Redis answers quickly again")) == 1


def test_a_client_tells_how_long_redis_takes_to_answer(redis: Redis) -> None:
    trips: list[float] = []
    client = new_client(redis, 5.0, on_sent=lambda: None, on_reply=trips.append)
    client.ping()
    redis.execute_command("CLIENT", "PAUSE", 50, "ALL")
    client.ping()
    client.close()
    assert max(trips) == trips[-1]
    assert 0.03 < trips[-1] < 5
