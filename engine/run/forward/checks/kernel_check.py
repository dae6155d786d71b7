"""Checks the GPU kernels of a model before an engine starts with them, once for each machine and build.

A child process compares each kernel with plain torch: see checked_kernels.py. A check that has passed is noted in the
user's cache folder, under a digest of everything that decides what a kernel does. Models that transformers computes
are not checked here: each start compares their logits with transformers' own code.
"""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.errors import KernelCheckFailed
from engine.models.load import ModelPath
from engine.run.config import EngineConfig
from engine.run.device import resolve_device
from engine.run.dtype import served_dtype

ENGINE = Path(__file__).parents[3]
SOURCES = (
    "kernels",
    "attention",
    "layers",
    "sampling",
    "run/forward/checks",
    "run/forward/rows.py",
)
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
#: -P: the child imports nothing from the working directory, in which others may write.
COMMAND = (sys.executable, "-P", "-m", "engine.run.forward.checks.checked_kernels")
TIMEOUT_S = 300.0  # compiling a model's kernels takes one to two minutes on two busy cores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedModel:
    """The values that decide which kernels a model launches, and on which shapes.

    folder: the checkpoint's. tensor_parallel_size: the ranks that share the model; the shapes are those of the first.
    has_adapters: whether requests may name adapters.
    """

    folder: str
    device: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    tensor_parallel_size: int
    has_adapters: bool = False


@dataclass(frozen=True)
class KernelFault:
    """A fault of a kernel. kernel: None if the check ended before the first launch, or ran out of memory."""

    kernel: str | None
    problem: str

    def __str__(self) -> str:
        if self.kernel is None:
            return f"the GPU kernels could not be checked: {self.problem}"
        return f"the GPU kernel for {self.kernel} does not work here: {self.problem}"


def with_checked_kernels(
    config: EngineConfig, model: ModelConfig, path: ModelPath, folder: Path
) -> EngineConfig:
    """Return the configuration, with the torch backend if a kernel of the Triton backend does not work.

    Raises KernelCheckFailed if the configuration refuses that.
    """
    device = resolve_device(config.device)
    takes_triton = config.attention_backend in ("auto", "triton") and find_spec("triton")
    if config.kernel_check == "off" or device.type != "cuda" or not takes_triton:
        return config
    if path.decoder is None:
        return config

    checked = CheckedModel(
        folder=str(folder),
        device=str(device),
        dtype=served_dtype(config.dtype, model.dtype, config.device).name,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        has_adapters=config.adapters is not None,
    )
    note = passed_folder() / _digest(checked, device)
    if note.exists():
        return config

    logger.info("the GPU kernels are checked, as this build has not run on this machine before")
    fault = find_fault(checked)
    if fault is None:
        with suppress(OSError):  # it is checked again at the next start
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
        return config
    return _config_despite(fault, config)


def _config_despite(fault: KernelFault, config: EngineConfig) -> EngineConfig:
    """Return the configuration to start with although there is a fault."""
    if config.kernel_check == "refuse":
        raise KernelCheckFailed(
            f"{fault}; set kernel_check='warn' to compute without our kernels, or 'off' to take the risk"
        )
    if fault.kernel is None:
        logger.warning("%s", fault)
        return config
    logger.error(
        "%s; attention_backend='torch' takes its place, which is several times slower", fault
    )
    return replace(config, attention_backend="torch")


def find_fault(
    model: CheckedModel, command: tuple[str, ...] = COMMAND, *, timeout_s: float = TIMEOUT_S
) -> KernelFault | None:
    """Check the kernels of a model in a child process; return the first fault, or None.

    command: starts the child. The model is added as its last argument.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            child = subprocess.run(
                [*command, json.dumps(asdict(model))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                timeout=timeout_s,
                env=environment,
                check=False,
            )
            status = child.returncode
            problem = f"its process ended with {_describe_status(status)}"
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
            problem = f"it did not end within {timeout_s:g} s"
        output.seek(0)
        errors.seek(0)
        announced = output.read().splitlines()
        error_lines = errors.read().split("\n")

    if status == 0:
        return None
    if status > 0:
        last_error = next((line for line in reversed(error_lines) if line.strip()), problem)
        problem = last_error.strip()
    kernel = announced[-1] if announced else None
    if "OutOfMemoryError" in problem:
        kernel = None  # no kernel is to blame for a lack of memory
    return KernelFault(kernel, problem)


def _describe_status(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def passed_folder() -> Path:
    """Return the folder that holds an empty file for each check that has passed."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tokenmill" / "passed-kernels"


def _digest(model: CheckedModel, device: torch.device) -> str:
    """Return a name for the device, its software, our kernels and the model's shapes."""
    driver = DRIVER_VERSION.read_text() if DRIVER_VERSION.exists() else ""
    properties = torch.cuda.get_device_properties(device)
    facts = [properties.name, properties.major, properties.minor, driver]
    facts += [torch.__version__, torch.version.cuda, version("triton")]
    digest = hashlib.sha256(repr([*facts, asdict(model)]).encode())
    digest.update((Path(model.folder) / "config.json").read_bytes())
    for source in SOURCES:
        place = ENGINE / source
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
