"""The proxies before the API server: they take their files, pass large uploads, and wait as long as it does."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.cli.server_commands import serve
from tests.ops.deployed import DEPLOY
from tokenmill.server.batches.calls import MAX_FILE_BYTES
from tokenmill.server.batches.uploads import MAX_OTHER_BYTES
from tokenmill.server.serve import KEEP_ALIVE_S

NGINX = (DEPLOY / "proxy" / "nginx.conf").read_text()
CADDY = (DEPLOY / "proxy" / "Caddyfile").read_text()
(TIMEOUT_S,) = (option.default for option in serve.params if option.name == "timeout")


def annotations() -> dict[str, str]:
    """Return what the Ingress says to ingress-nginx, by nginx's own names."""
    manifests = yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "api.yaml").read_text())
    (ingress,) = (each for each in manifests if each["kind"] == "Ingress")
    noted: dict[str, Any] = ingress["metadata"]["annotations"]
    return {name.rpartition("/")[2].replace("-", "_"): value for name, value in noted.items()}


def directive(name: str) -> str:
    (value,) = re.findall(rf"^\s*{name} (\S+);$", NGINX, re.MULTILINE)
    return str(value)


def megabytes(text: str) -> int:
    assert text.endswith("m"), text
    return int(text[:-1])


def test_the_largest_upload_passes() -> None:
    needed = MAX_FILE_BYTES + MAX_OTHER_BYTES
    for text in (directive("client_max_body_size"), annotations()["proxy_body_size"]):
        assert megabytes(text) << 20 >= needed


def test_events_and_uploads_pass_as_they_come() -> None:
    for name in ("proxy_buffering", "proxy_request_buffering"):
        assert directive(name) == annotations()[name] == "off"
    settings = [line for line in CADDY.splitlines() if not line.strip().startswith("#")]
    assert not [line for line in settings if "flush_interval" in line or "request_buffers" in line]


def test_a_proxy_waits_longer_than_an_answer_takes() -> None:
    assert int(directive("proxy_read_timeout").removesuffix("s")) > TIMEOUT_S
    assert int(annotations()["proxy_read_timeout"]) > TIMEOUT_S


def test_a_proxy_closes_an_idle_connection_before_the_server_does() -> None:
    (seconds,) = re.findall(r"keepalive (\d+)s", CADDY)
    assert int(seconds) < KEEP_ALIVE_S
    assert "keepalive" not in NGINX, "nginx makes a connection for each request then"


def test_the_numbers_are_not_shown_outside() -> None:
    sites = len(re.findall("^server ", NGINX, re.MULTILINE))
    assert sites == 2
    assert len(re.findall(r"location = /metrics \{\s+return 404;", NGINX)) == sites
    assert len(re.findall(r"^\s*respond /metrics 404$", CADDY, re.MULTILINE)) == sites


def test_the_dashboard_learns_its_name_and_that_its_reader_came_by_tls() -> None:
    """Caddy sends both by itself."""
    site = NGINX.partition("server_name tokenmill.example.com;")[2]
    assert "proxy_pass http://127.0.0.1:9181;" in site
    for header in ("Host $host", "X-Forwarded-Proto $scheme"):
        assert f"proxy_set_header {header};" in site


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("caddy") is None, reason="not installed: caddy (Debian: caddy)")
def test_caddy_takes_its_file() -> None:
    command = ["caddy", "validate", "--config", str(DEPLOY / "proxy" / "Caddyfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("nginx") is None, reason="not installed: nginx (Debian: nginx)")
def test_nginx_takes_its_file(tmp_path: Path) -> None:
    """Without the certificate, which is not here."""
    server = re.sub(r"^\s*ssl_certificate.*$", "", NGINX, flags=re.MULTILINE)
    server = server.replace("443 ssl", "8443")
    (tmp_path / "nginx.conf").write_text(f"events {{}}\nhttp {{\n{server}\n}}\n")
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    command += ["-g", f"pid {tmp_path}/pid; error_log stderr;"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "syntax is ok" in done.stderr, done.stderr
