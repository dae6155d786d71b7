"""The Procfile's Redis: for its owner alone, on a socket that every other command of the Procfile finds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import psutil
import pytest
from redis import Redis

from ops.redis_server import FOLDER, socket_in, socket_url, wait_until_ready
from tests.rq_workers import ROOT

SERVER = (sys.executable, "-m", "ops.redis_server")
KNOCK = "import os, socket, sys; os.setuid({user}); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder that everybody may enter, with a path that is short enough for a socket."""
    with TemporaryDirectory(prefix="r") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def running_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the server as the Procfile does."""
    process = subprocess.Popen([*SERVER, "--dir", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_until_ready(socket_url(socket_in(folder)))
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=10)


def refusal(folder: Path) -> str:
    """Return with what message the server refuses to start."""
    done = subprocess.run(
        [*SERVER, "--dir", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    return done.stderr


def knock(user: int, folder: Path) -> str:
    """Connect as this user; return what went wrong."""
    command = [sys.executable, "-c", KNOCK.format(user=user), str(socket_in(folder))]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_no_other_user_of_the_machine_reaches_the_server(short_folder: Path) -> None:
    folder = short_folder / "redis"
    folder.mkdir(mode=0o777)
    with running_server(folder) as process:
        assert psutil.Process(process.pid).net_connections("inet") == []
        assert folder.stat().st_mode & 0o777 == 0o700
        assert "PermissionError" not in knock(os.getuid(), folder)
        if os.getuid() == 0:  # only root can try another user
            assert "PermissionError" in knock(65534, folder)


def test_the_server_says_how_it_is_reached(short_folder: Path) -> None:
    with running_server(short_folder / "a redis") as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        url = line.partition("export RQ_REDIS_URL=")[2]
        with Redis.from_url(url) as client:
            assert client.ping()


def test_the_procfile_sends_worker_and_dashboard_to_its_own_server_unless_told_otherwise() -> None:
    lines = [line for line in (ROOT / "Procfile").read_text().splitlines() if "redis_server --wait" in line]
    assert len(lines) == 2
    for line in lines:
        export = line.partition(": ")[2].partition(" && ")[0]
        for given, expected in ((None, socket_url(socket_in(FOLDER))), ("redis://x", "redis://x")):
            environment = {k: v for k, v in os.environ.items() if k != "RQ_REDIS_URL"}
            environment |= {"RQ_REDIS_URL": given} if given else {}
            shown = subprocess.run(
                ["sh", "-c", f"{export} && printenv RQ_REDIS_URL"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            assert urlsplit(shown) == urlsplit(expected)


def test_a_second_server_does_not_take_the_folder_of_the_first(short_folder: Path) -> None:
    with running_server(short_folder), Redis.from_url(socket_url(socket_in(short_folder))) as client:
        client.set("kept", "1")
        assert "runs in" in refusal(short_folder)
        assert client.get("kept") == b"1"


def test_a_folder_of_another_user_or_a_link_is_refused(short_folder: Path) -> None:
    link = short_folder / "link"
    link.symlink_to(short_folder)
    assert "cannot hold Redis' socket" in refusal(link)
    if os.getuid() == 0:  # only root can give a folder away
        foreign = short_folder / "foreign"
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)
        assert "belongs to another user" in refusal(foreign)


def test_a_path_too_long_for_a_socket_is_refused_by_name(short_folder: Path) -> None:
    assert "longer than a socket's path may be (103 bytes)" in refusal(short_folder / ("x" * 100))
