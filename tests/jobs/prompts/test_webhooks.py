"""The one sender of webhooks: which addresses it calls, what it sends, and how long it takes at most."""

import socket
import ssl
import threading
from typing import Any

import pytest

from jobs.context import webhooks
from jobs.context.webhooks import call_webhook
from jobs.errors import InvalidJob
from tests.worker.webhook_server import trickling_server, webhook_server

LOOPBACK = ("127.0.0.1",)


def resolver(*addresses: str) -> Any:
    """Stands in for a name server, which gives other addresses each time it is asked."""
    answers = list(addresses)

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    return resolve


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::ffff:127.0.0.1"]
)
def test_a_name_that_leads_to_an_address_inside_is_not_called(address: str) -> None:
    with pytest.raises(InvalidJob, match="not a public address: add that address"):
        call_webhook("http://hooks.example:1/", ["hooks.example"], resolve=resolver(address))


def test_the_address_that_was_checked_is_the_one_that_is_called() -> None:
    with webhook_server() as server:
        url = f"http://hooks.example:{server.server_port}/a?b=c"
        allowed = ["hooks.example", *LOOPBACK]
        # A second look at the name would lead elsewhere, and find no further answer here.
        assert call_webhook(url, allowed, method="GET", resolve=resolver("127.0.0.1")) == 204
        assert server.headers[0]["Host"] == f"hooks.example:{server.server_port}"


def test_a_second_address_is_called_where_the_first_does_not_answer() -> None:
    with webhook_server() as server:
        found = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in ("127.0.0.9", "127.0.0.1")]
        allowed = ["127.0.0.1", "127.0.0.9"]
        assert (
            call_webhook(server.url, allowed, method="GET", resolve=lambda *_, **__: found) == 204
        )


def test_headers_that_change_where_a_request_ends_are_not_taken() -> None:
    with webhook_server() as server:
        given = {
            "host": "inside",
            "Content-Length": "0",
            "Transfer-Encoding": "chunked",
            "X-Mine": "1",
        }
        assert call_webhook(server.url, LOOPBACK, headers=given, body=b'{"a": 1}') == 204
        assert server.received == [{"a": 1}]
        [headers] = server.headers
        assert headers["X-Mine"] == "1"
        assert headers["Host"] == f"127.0.0.1:{server.server_port}"
        with pytest.raises(ValueError, match="header"):
            call_webhook(server.url, LOOPBACK, headers={"X-Mine": "1\r\nX-Other: 2"}, body=b"{}")


def test_the_port_that_https_has_anyway_is_not_told_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", lambda self, sock, **_: sock)
    with webhook_server() as server:
        place = ("127.0.0.1", server.server_port)
        monkeypatch.setattr(webhooks, "_connect", lambda _: socket.create_connection(place))
        for port in (":443", ":80"):
            assert call_webhook(f"https://127.0.0.1{port}/", LOOPBACK, method="GET") == 204
    assert [headers["Host"] for headers in server.headers] == ["127.0.0.1", "127.0.0.1:80"]


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    with webhook_server() as server:
        assert call_webhook(server.url, LOOPBACK, method="GET") == 204


def test_an_answer_that_trickles_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "DEADLINE_S", 0.5)
    with (
        trickling_server() as server,
        pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"),
    ):
        call_webhook(server.url, LOOPBACK, method="GET")


def test_a_host_with_many_addresses_has_the_whole_deadline_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "DEADLINE_S", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer_late() -> None:
            with listener.accept()[0] as client:
                client.recv(1000)
                threading.Event().wait(
                    1.2
                )  # more than the first address' share of the deadline, 1 s
                client.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=answer_late)
        thread.start()
        found = [(socket.AF_INET, 1, 6, "", (f"127.0.0.{last}", 0)) for last in (1, 2, 3, 4)]
        hosts = [f"127.0.0.{last}" for last in (1, 2, 3, 4)]
        assert (
            call_webhook(f"http://127.0.0.1:{port}/", hosts, resolve=lambda *_, **__: found) == 204
        )
        thread.join()
