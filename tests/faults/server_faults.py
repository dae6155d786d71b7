"""What hits Redis and the way to it: cut connections, lost replies, and a server that fails."""

import time
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from tests.faults.harness import LEASE_S, Harness
from tests.faults.proxy import lose_replies
from tests.forking import FORK


def cut_connections(faults: Harness, count: int) -> None:
    """CLIENT KILL of everybody, again and again, under two workers."""
    names = _two_at_work(faults)
    for _ in range(count):
        faults.top_up()
        faults.a_moment(0.2)
        faults.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        faults.redis.connection_pool.disconnect()  # our own others are cut as well
        faults.count("CLIENT KILL")
    for name in names:
        faults.end_cleanly(name)
    faults.settle("CLIENT KILL")


def _two_at_work(faults: Harness) -> list[str]:
    """Two workers that have begun: one that cannot reach Redis while it starts ends with an error."""
    faults.ledger.ask_jobs(40)
    names = [faults.start(), faults.start()]
    deadline = time.monotonic() + 10
    while (
        not all(faults.plan_of(name).has_work.exists() for name in names)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    return names


def lost_replies(faults: Harness, count: int) -> None:
    """A line that drops replies: the command was carried out, the worker does not know."""
    socket = faults.folder / "redis" / "p"
    server = faults.folder / "redis" / "s"
    proxy = FORK.Process(
        target=lose_replies, args=(socket, server, 0.03, faults.rng.randrange(2**32))
    )
    proxy.start()
    while not socket.exists():
        time.sleep(0.01)
    try:
        for _ in range(count):
            faults.top_up()
            name = faults.start(url=f"unix://{socket}")
            time.sleep(faults.rng.uniform(0.3, 1.5))
            faults.end(name)
            faults.count("lossy line, then SIGKILL")
    finally:
        proxy.kill()
        proxy.join()
        socket.unlink()
    faults.settle("lost replies")


def server_faults(faults: Harness, count: int) -> None:
    """Redis killed and restarted, frozen past the lease, or out of memory, under two workers."""
    names = _two_at_work(faults)
    kinds: list[tuple[str, Callable[[Harness], None]]] = [
        ("Redis killed and restarted", _restart_server),
        ("Redis frozen past the lease", _freeze_server),
        ("Redis out of memory", _fill_server),
    ]
    for turn in range(count):
        faults.top_up()
        faults.a_moment(0.5)
        what, fault = kinds[turn % 3]
        fault(faults)
        faults.count(what)
    for name in names:
        faults.end_cleanly(name)
    faults.settle("Redis")


def _restart_server(faults: Harness) -> None:
    faults.server.kill()
    faults.a_moment(0.5)
    faults.server.restart()
    with suppress(RedisError):
        faults.redis.ping()


def _freeze_server(faults: Harness) -> None:
    faults.server.freeze()
    time.sleep(LEASE_S + 1)  # the fault is the time itself
    faults.server.thaw()


def _fill_server(faults: Harness) -> None:
    faults.redis.config_set("maxmemory", 1)
    faults.a_moment(1.0)
    faults.redis.config_set("maxmemory", 0)
