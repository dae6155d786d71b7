"""A real HTTP server of the S3 protocol (moto's), and a proxy before it that fails as asked."""

import http.client
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

BUCKET = "bucket"

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}

#: 503: it asks to come back later. cut: its reply ends half way. lost: it does what is asked, and no reply
#: comes. slow: it takes a while. 403, expired: it refuses.
Fault = Literal["503", "cut", "lost", "slow", "403", "expired"]

#: Chooses by a request's method and path; None lets it pass.
Choose = Callable[[str, str], Fault | None]

SLOW_S = 0.05

#: Of a reply's headers, those that the proxy writes itself.
_OWN_HEADERS = {"transfer-encoding", "connection", "content-length", "date", "server"}


@dataclass(frozen=True)
class S3:
    """url: of the server itself. client: boto3's, which says what is there."""

    url: str
    client: Any

    def environment(self, url: str | None = None) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": url or self.url}

    def put(self, key: str, contents: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=contents)

    def get(self, key: str) -> bytes:
        contents: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return contents

    def has(self, key: str) -> bool:
        """Whether there is such an object, without a look at all others."""
        try:
            self.client.head_object(Bucket=BUCKET, Key=key)
        except ClientError:
            return False
        return True

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key)

    def names(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def uploads(self) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [each["Key"] for each in found]

    def empty(self) -> None:
        """Remove all objects and uploads."""
        for key in self.names():
            self.delete(key)
        for each in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
            self.client.abort_multipart_upload(
                Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"]
            )

    def put_rows(self, key: str, table: pa.Table, **options: Any) -> None:
        file = io.BytesIO()
        pq.write_table(table, file, **options)
        self.put(key, file.getvalue())

    def rows(self, prefix: str) -> list[dict[str, Any]]:
        """Return the rows of a run's parts, in order."""
        keys = [key for key in self.names(prefix) if key.rpartition("/")[2].endswith(".parquet")]
        return [row for key in keys for row in pq.read_table(io.BytesIO(self.get(key))).to_pylist()]


@contextmanager
def running_s3() -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 3}),
        )
        client.create_bucket(Bucket=BUCKET)
        found = S3(url, client)
        found.empty()  # moto keeps what a server before this one had
        yield found
    finally:
        server.stop()


class FaultyProxy:
    """Passes requests on to a server, but for those that `choose` names a fault for."""

    def __init__(self, server_url: str, choose: Choose = lambda method, path: None) -> None:
        self.choose, self.requests = choose, 0
        proxy, target = self, server_url.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.choose(self.command, self.path)
                if fault == "slow":
                    time.sleep(SLOW_S)
                if fault == "503":
                    return self._refuse(503, "SlowDown", "Please reduce your request rate.")
                if fault == "403":
                    return self._refuse(403, "AccessDenied", "Access Denied")
                if fault == "expired":
                    return self._refuse(400, "ExpiredToken", "The provided token has expired.")
                connection = http.client.HTTPConnection(target, timeout=30)
                try:
                    headers = {
                        name: value for name, value in self.headers.items() if name != "Host"
                    }
                    connection.request(self.command, self.path, body, headers)
                    reply = connection.getresponse()
                    contents = reply.read()
                finally:
                    connection.close()
                if fault == "lost":
                    self.close_connection = True
                    return None
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in _OWN_HEADERS:
                        self.send_header(name, value)
                length = reply.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(contents)))
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(contents[: len(contents) // 2])
                    self.close_connection = True
                elif self.command != "HEAD":
                    self.wfile.write(contents)
                return None

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def _refuse(self, status: int, code: str, message: str) -> None:
                text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text)

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *arguments: object) -> None:
                """A worker that was killed has left its connection."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def use_environment(patch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Set variables, and none of those that this machine may have for a store of its own."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)


def failing(
    fault: Fault, times: int, method: str = "", path: str = ""
) -> Callable[[str, str], Fault | None]:
    """Return what a FaultyProxy chooses that fails so many requests of a kind."""
    left = [times]

    def choose(asked: str, where: str) -> Fault | None:
        if left[0] and method in asked and path in where:
            left[0] -= 1
            return fault
        return None

    return choose
