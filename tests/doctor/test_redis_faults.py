"""`tokenmill doctor` finds what is wrong with a Redis, by real settings and users, and writes nothing."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from jobs.doctor import redis_server
from jobs.doctor.findings import Finding, Level
from jobs.doctor.redis_server import (
    Role,
    Server,
    check_permissions,
    check_server,
    not_served,
    reach,
)
from tests.doctor.conftest import set_up
from tests.rq_workers import ROOT

PASSWORD = "s3cr:et"


def bad(findings: Iterable[Finding], level: Level = Level.FAULT) -> list[Finding]:
    found = list(findings)
    assert found
    return [each for each in found if each.level is level]


def rules_of(role: str) -> list[str]:
    """The rules that we document, without the password and what begins them."""
    lines = (ROOT / "ops" / "redis-users.acl").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(f"user {role} ")]
    return [each for each in line.split()[2:] if not each.startswith(">")]


def as_user(redis: Redis, url: str, role: str, rules: Sequence[str], given: str = PASSWORD) -> str:
    """Make a user of these rules; return the URL under which it is known."""
    redis.execute_command("ACL", "SETUSER", role, "reset", f">{PASSWORD}", *rules)
    return url.replace("unix://", f"unix://{role}:{given.replace(':', '%3A')}@")


def refused(url: str) -> Finding:
    with pytest.raises(RedisError) as error:
        reach(url)
    return not_served(url, error.value)


def quick(url: str) -> Server:
    """The server, as if it had answered at once: a machine that is busy is slow."""
    return replace(reach(url), latency_s=0.001)


@pytest.mark.parametrize(
    ("settings", "level", "found", "mend"),
    [
        (
            {"maxmemory-policy": "allkeys-lru"},
            Level.FAULT,
            "throws away jobs",
            "maxmemory-policy noeviction",
        ),
        (
            {"appendonly": "no"},
            Level.FAULT,
            "neither append-only file nor snapshots",
            "appendonly yes",
        ),
        (
            {"appendonly": "no", "save": "3600 1"},
            Level.WARNING,
            "at most snapshots (save 3600 1)",
            "appendonly",
        ),
        ({"maxmemory": "800kb"}, Level.FAULT, "no job can be enqueued", "CONFIG SET maxmemory"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_settings_by_which_jobs_are_lost_are_found(
    redis: Redis, redis_url: str, settings: dict[str, str], level: Level, found: str, mend: str
) -> None:
    set_up(redis, settings)
    (finding,) = bad(check_server(quick(redis_url)), level)
    assert found in finding.text
    assert mend in finding.mend


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({"redis_version": "6.0.16"}, "version 6.0.16"),
        ({"role": "slave"}, "replica"),
        ({"cluster_enabled": 1}, "cluster"),
        ({"aof_last_write_status": "err"}, "could not write to its disk"),
    ],
    ids=str,
)
def test_a_server_that_cannot_serve_is_found(
    redis: Redis, redis_url: str, info: dict[str, object], found: str
) -> None:
    server = quick(redis_url)
    (finding,) = bad(check_server(replace(server, info={**server.info, **info})))
    assert found in finding.text
    assert finding.mend


def test_a_server_that_is_not_there_or_never_answers_is_told_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_server, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        finding = refused(f"redis://u:{PASSWORD}@127.0.0.1:{port}/3")
    assert f"redis://127.0.0.1:{port}/3 does not answer" in finding.text
    gone = refused(f"redis://127.0.0.1:{port}")
    assert "refused" in gone.text
    assert "RQ_REDIS_URL" in gone.mend


def test_a_wrong_password_is_told_and_not_shown(redis: Redis, redis_url: str) -> None:
    finding = refused(as_user(redis, redis_url, "worker", rules_of("worker"), given="Wr0ng"))
    assert "invalid username-password pair" in finding.text
    assert "user and password in RQ_REDIS_URL" in finding.mend
    assert "Wr0ng" not in str(finding)


@pytest.mark.parametrize("role", ["worker", "producer", "dashboard"])
def test_the_rules_that_we_document_are_enough(redis: Redis, redis_url: str, role: Role) -> None:
    url = as_user(redis, redis_url, role, rules_of(role))
    server = quick(url)
    found = [*check_server(server), *check_permissions(server, role)]
    assert {each.level for each in found} == {Level.OK}
    assert redis.dbsize() == 0, "it has written"


@pytest.mark.parametrize(
    ("role", "without", "missing"),
    [
        ("worker", "+evalsha", "+evalsha"),
        ("worker", "&rq:pubsub:*", "&rq:pubsub:*"),
        ("worker", "+@transaction", "+@transaction"),
        ("producer", "+rpush", "+rpush"),
        ("producer", "~rq:job:*", "~rq:job:*"),
    ],
)
def test_a_missing_rule_is_named_with_the_command_that_adds_it(
    redis: Redis, redis_url: str, role: Role, without: str, missing: str
) -> None:
    rules = [each for each in rules_of(role) if each != without]
    (finding,) = bad(check_permissions(reach(as_user(redis, redis_url, role, rules)), role))
    assert f"ACL SETUSER {role}" in finding.mend
    assert missing in finding.mend
    assert f"if no {role} is to run here, say with --role" in finding.mend
    redis.execute_command("ACL", "SETUSER", role, *finding.mend.partition(", ")[0].split()[3:])
    url = redis_url.replace("unix://", f"unix://{role}:{PASSWORD.replace(':', '%3A')}@")
    assert bad(check_permissions(reach(url), role)) == [], "what it says to do does not do"
    assert redis.dbsize() == 0


def test_a_default_user_without_rights_is_found_by_the_worker_before_a_restart(
    redis: Redis, redis_url: str
) -> None:
    url = as_user(redis, redis_url, "worker", rules_of("worker"))
    redis.execute_command("ACL", "SETUSER", "default", "-xadd")
    found = bad(check_server(quick(url)))
    redis.execute_command("ACL", "SETUSER", "default", "+@all")
    if redis.info("server")["redis_version"].startswith("6."):
        assert found == [], "it replays without a user"
    else:
        (finding,) = found
        assert "a restart drops every transaction" in finding.text
        assert "ACL SETUSER default off ~* &* +@all" in finding.mend


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (
            "[SSL] certificate verify failed: unable to get local issuer certificate",
            "ssl_ca_certs=",
        ),
        ("certificate verify failed: Hostname mismatch, not valid for 'a'", "as its certificate"),
        ("certificate verify failed: certificate has expired", "renew the certificate"),
        (
            "Error 2 connecting to h:6380. No such file or directory.",
            "correct the path ssl_ca_certs",
        ),
        ("Connection refused", "start Redis"),
    ],
    ids=["unknown", "other name", "expired", "no file", "away"],
)
def test_each_error_of_tls_is_told_with_what_mends_it(error: str, mend: str) -> None:
    finding = not_served("rediss://worker:secret@h:6380/0", RedisConnectionError(error))
    assert mend in finding.mend
    assert "secret" not in finding.text
