"""A Redis that speaks TLS only, by a terminator before it, and knows only the users of ops/redis-users.acl."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from tests.redis_server import wait_until_ready
from tests.rq_workers import ROOT

WORKER_PASSWORD, PRODUCER_PASSWORD, ADMIN_PASSWORD = "Wk7xQ-secret", "Pd9zR-secret", "Ad3vT-secret"


@dataclass(frozen=True)
class SecureRedis:
    """Addresses of one server; only tests may use `admin`, which goes round TLS."""

    port: int
    ca: Path
    admin: Redis
    process: subprocess.Popen[bytes]

    def url(self, user: str, password: str) -> str:
        """What `--url` takes."""
        return secure_url(user, password, self.port, self.ca)


def secure_url(user: str, password: str, port: int, ca: Path) -> str:
    """Return the address of a server behind TLS."""
    return f"rediss://{user}:{password}@localhost:{port}/0?ssl_ca_certs={ca}"


@contextmanager
def running_secure_redis(
    executable: str, folder: Path, socket_folder: Path
) -> Iterator[SecureRedis]:
    """Start a server whose files lie in `folder`, and its terminator; stop both at the end."""
    users = write_users(folder)
    socket = socket_folder / "s"
    where = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    process = subprocess.Popen(
        [executable, *where, "--save", "", "--aclfile", users],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    admin = Redis(unix_socket_path=str(socket), username="admin", password=ADMIN_PASSWORD)
    try:
        wait_until_ready(f"unix://admin:{ADMIN_PASSWORD}@{socket}", process)
        with tls_before(folder, socket) as port:
            yield SecureRedis(port, folder / "ca.pem", admin, process)
    finally:
        admin.close()
        process.terminate()
        process.wait(timeout=10)


def write_users(folder: Path, default: str = "off") -> str:
    """Write the users of ops/redis-users.acl into a file; return its path."""
    users = (
        (ROOT / "ops" / "redis-users.acl")
        .read_text()
        .replace("user default off", f"user default {default}")
    )
    users = users.replace("user admin off", "user admin on")
    passwords = {"1": WORKER_PASSWORD, "2": PRODUCER_PASSWORD, "5": ADMIN_PASSWORD}
    for number, password in passwords.items():
        users = users.replace(f"change-this-{number}", password)
    (folder / "users.acl").write_text(users)
    return str(folder / "users.acl")


def _make_certificate(folder: Path) -> None:
    """Make `server.pem` and `server.key` for localhost, signed by a CA of its own, `ca.pem`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command, which makes the test's certificates, is not installed")

    def run(*args: str) -> None:
        subprocess.run([openssl, *args], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = (
        "-addext",
        "keyUsage=critical,keyCertSign",
        "-subj",
        "/CN=test CA",
    )  # Python 3.13 is strict
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", *authority)
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost\nauthorityKeyIdentifier=keyid\n")
    signer = (
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-extfile",
        "names",
        "-days",
        "2",
    )
    run("x509", "-req", "-in", "server.csr", "-out", "server.pem", *signer)


@contextmanager
def tls_before(folder: Path, socket: Path) -> Iterator[int]:
    """Pass what arrives over TLS, whose CA is `folder`'s ca.pem, to a server's unix socket; yield the port."""
    _make_certificate(folder)
    files = (str(folder / "server.pem"), str(folder / "server.key"), str(socket))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.worker.tls_terminator", *files],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stdout.close()
