"""Calls webhooks: URLs that producers name, on hosts that an operator allows."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from jobs.common.display import brief
from jobs.errors import InvalidJob, InvalidValue

#: The most seconds of one call, from looking up the host's name to the headers of the response.
DEADLINE_S = 10.0

MAX_URL_CHARS = 2000
#: Headers that only this module sets. With other values, a request could reach another server than its URL names.
_OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})


def host_of(url: Any) -> str:
    """Return a URL's host. Raises InvalidJob if the text is no URL of http or https, or names a user."""
    return str(_parsed_url(url).hostname)


def check_host(url: str, hosts: Collection[str]) -> None:
    """Raise InvalidJob for a host that this worker may not call."""
    host = host_of(url)
    if host not in hosts:
        raise InvalidJob(
            f"webhook: this worker may not call the host {brief(host)}: add it to TOKENMILL_ALLOWED_WEBHOOK_HOSTS"
        )


def call_webhook(
    url: str,
    hosts: Collection[str],
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    resolve: Callable[..., Any] = socket.getaddrinfo,
) -> int:
    """Make one HTTP request, and return the status of the response. Follows no redirect and uses no proxy.

    hosts: names and addresses that an operator allows. A loopback or private address is called only if it is in
    `hosts`. The request goes to the address that was checked; the name is not looked up again.
    resolve: looks up the addresses of a name. Nothing interrupts it, so it may take longer than DEADLINE_S.
    Raises InvalidJob for an address that is not allowed. Raises OSError, HTTPException or ValueError if no response
    came within DEADLINE_S.
    """
    check_host(url, hosts)
    parts = _parsed_url(url)
    deadline = time.monotonic() + DEADLINE_S
    addresses = _allowed_addresses(parts, hosts, resolve)
    sock = _connect(addresses)
    sock.settimeout(DEADLINE_S)  # limits a single read; the timer limits the whole call
    # TLS takes over `sock`, so the timer needs a copy to shut the connection down.
    sock_copy = sock.dup()
    seconds_left = deadline - time.monotonic()
    timer = threading.Timer(seconds_left, _shut_down, [sock_copy])
    timer.start()
    try:
        status = _send(sock, parts, method, headers or {}, body)
    except (OSError, HTTPException):
        if time.monotonic() < deadline:
            raise
        # Otherwise the timer has caused the error, and TimeoutError is raised below.
    finally:
        timer.cancel()
        sock_copy.close()
        sock.close()
    if time.monotonic() >= deadline:
        raise TimeoutError(f"no answer within {DEADLINE_S:g} s")
    return status


def _send(
    sock: socket.socket,
    parts: SplitResult,
    method: str,
    headers: Mapping[str, str],
    body: bytes | None,
) -> int:
    """Send a request over a connected socket, and return the status of the response. parts: the URL's parts."""
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    all_headers = {"Connection": "close"}
    for name, value in headers.items():
        if name.lower() not in _OWN_HEADERS:
            all_headers[name] = value

    connection = HTTPConnection(str(parts.hostname), parts.port)
    if parts.scheme == "https":
        connection = HTTPSConnection(str(parts.hostname), parts.port, context=_tls())
        sock = _tls().wrap_socket(sock, server_hostname=parts.hostname)
    connection.sock = sock
    try:
        connection.request(method, target, body, all_headers)
        return connection.getresponse().status
    finally:
        sock.close()


def _shut_down(sock: socket.socket) -> None:
    """End a connection, so that a read from it raises an error."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _parsed_url(url: Any) -> SplitResult:
    """Return the parts of a URL of http or https. Raises InvalidJob."""
    parts = _split_url(url)
    if parts is None:
        raise InvalidValue("webhook is {}, expected a URL such as https://host/path", brief(url))
    if "@" in parts.netloc:  # HTTPConnection takes no user and password
        raise InvalidJob(
            "webhook: a URL with user or password, expected one such as https://host/path"
        )
    return parts


def _split_url(url: Any) -> SplitResult | None:
    """Return the parts of a URL of http or https; None for anything else."""
    if not isinstance(url, str) or len(url) > MAX_URL_CHARS:
        return None
    if not url.isascii() or not url.isprintable():
        return None
    try:
        parts = urlsplit(url)
        port = parts.port  # raises ValueError for a port that is no number up to 65535
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return None
    return parts


def _allowed_addresses(
    parts: SplitResult, hosts: Collection[str], resolve: Callable[..., Any]
) -> list[tuple[str, int]]:
    """Look up the host of a URL, and return the addresses that may be called, each with the port.

    Raises InvalidJob if there is no such address.
    """
    usual_port = 443 if parts.scheme == "https" else 80
    port = parts.port or usual_port
    addresses = []
    for *_, socket_address in resolve(parts.hostname, port, type=socket.SOCK_STREAM):
        addresses.append(str(socket_address[0]))  # the port follows the address
    allowed = [(address, port) for address in addresses if _may_call(address, hosts)]
    if not allowed:
        raise InvalidJob(
            f"webhook: the host {brief(parts.hostname)} leads to {addresses[0]}, "
            "which is not a public address: add that address to TOKENMILL_ALLOWED_WEBHOOK_HOSTS"
        )
    return allowed


def _may_call(address: str, hosts: Collection[str]) -> bool:
    """Whether an address may be called: whether it is public, or the operator allows it."""
    without_zone, _, _ = address.partition("%")
    ip = ip_address(without_zone)
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped  # this IPv6 address stands for an IPv4 address
    is_public = ip.is_global and not ip.is_multicast
    return is_public or str(ip) in hosts


def _connect(addresses: list[tuple[str, int]]) -> socket.socket:
    """Connect to the first address that answers. Raises OSError if none does.

    Each address may take an equal share of DEADLINE_S.
    """
    *earlier_addresses, last_address = addresses
    share_s = DEADLINE_S / len(addresses)
    for address in earlier_addresses:
        with suppress(OSError):  # the next address is tried
            return socket.create_connection(address, share_s)
    return socket.create_connection(last_address, share_s)


@cache
def _tls() -> ssl.SSLContext:
    """Return the settings of TLS for all hosts. Cached, because reading the authorities' certificates takes long."""
    return ssl.create_default_context()
