"""RankGroup: the driver's side of a tensor-parallel engine: starts ranks, sends steps, takes tokens."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine import errors
from engine.checkpoint.adapter_folder import Adapter
from engine.checkpoint.model_config import ModelConfig
from engine.errors import AdapterRefused, CollectiveFailed, ConfigError, EngineError, RankFailed
from engine.layers.parallel import TensorParallel
from engine.models.load import choose_path
from engine.run.config import EngineConfig
from engine.run.device import resolve_device
from engine.run.forward.checks.kernel_check import with_checked_kernels
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.runner import PendingTokens, PoolSize, Runner, StateRows
from engine.run.forward.single_pass_runner import SinglePassRunner
from engine.sampling.sampling_batch import SamplingBatch
from engine.schedule.step_batch import StepBatch
from engine.tensor_parallel.block_tables import SentTables
from engine.tensor_parallel.collectives import open_store
from engine.tensor_parallel.messages import (
    Channel,
    Kind,
    Message,
    Tokens,
    encode,
    pack_step,
    unpack_tokens,
)

# multiprocessing's spawn would run the caller's main module again in each rank and pickle what it sends
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[4:]; descriptor, driver_pid, thread_id = map(int, sys.argv[1:4]); "
    "from engine.tensor_parallel.lifeline import hold; "
    "hold(descriptor, driver_pid=driver_pid, thread_id=thread_id); "
    "from engine.tensor_parallel.rank import main; main(descriptor)"
)
REAP_TIMEOUT_S = 10.0


class RankProcess:
    """Starts one rank. It ends with the driver, on a STOP, or on `kill`."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        """timeout_s: how long the rank may leave a message unread."""
        self.rank = rank
        driver_end, rank_end = socket.socketpair()
        arguments = map(str, (rank_end.fileno(), os.getpid(), threading.get_native_id(), *sys.path))
        with rank_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *arguments],
                pass_fds=[rank_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the driver's standard output belongs to the program that uses the engine
                process_group=0,  # a Ctrl-C in the terminal is the driver's alone
            )
        self.channel = Channel(driver_end, timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe_end(self) -> str:
        """Say how the process ended, once its channel has closed."""
        try:
            status = self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its channel"
        if status >= 0:
            return f"it exited with status {status}"
        known = {number.value: number.name for number in signal.Signals}
        return f"it was killed by {known.get(-status, f'signal {-status}')}"

    def wait(self, timeout_s: float) -> None:
        """Wait until the process ends, for timeout_s at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """End the process, if it still runs, and close the channel to it."""
        self._process.kill()
        self.wait(REAP_TIMEOUT_S)
        self.channel.close()


START_TIMEOUT_S = 1800.0  # a large checkpoint from a slow disk
MEET_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
BLAME_TIMEOUT_S = 2.0  # how long a broken collective waits for the rank that broke it to be known


#: The kinds of messages that may come while one is awaited: a rank goes on while the driver waits for another one,
#: and an adapter is loaded while steps run.
_EARLY = {
    Kind.ARRIVED: (Kind.MET, Kind.READY),
    Kind.MET: (Kind.READY,),
    Kind.LOADED: (Kind.TOKENS,),
}


class RankIsVictim(RankFailed):
    """A rank has not failed itself: it has noticed that another rank is gone."""


def _reported(rank: int, error_type: str, text: str) -> EngineError:
    """Read a rank's own report: the same ConfigError that one process would raise, else RankFailed."""
    kind = getattr(errors, error_type, None)
    if isinstance(kind, type) and issubclass(kind, ConfigError):
        return kind(f"rank {rank}: {text}")
    reason = f"{error_type}: {text}"
    if kind is CollectiveFailed:
        return RankIsVictim(rank, reason)
    return RankFailed(rank, reason)


class RankTokens(PendingTokens):
    """The tokens that rank 0 will send for one launched step; the first step has number 0."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self._group = group
        self._number = number

    def wait(self) -> NDArray[np.int64]:
        token_ids, self.logprobs, self.pooled = self._group.receive_tokens(self._number)
        return token_ids


class RankGroup:
    """Starts the ranks, sends them each step, and ends them all when one of them fails.

    Raises ConfigError or a subclass if the ranks cannot load the model as configured, RankFailed if a rank ends while
    it starts.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        folder: Path,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        meet_timeout_s: float = MEET_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        if choose_path(model, config.model_path).decoder is not None:
            check_split(model, config.tensor_parallel_size)
        devices = rank_devices(config)
        self._step_timeout_s = step_timeout_s
        self._failure: EngineError | None = None
        self._tables = SentTables(config.num_seqs, config.block_size)
        self._num_launched = 0
        self._num_answered = 0
        #: The ranks' messages that came while an earlier kind was awaited, in their order.
        self._early: dict[Kind, deque[tuple[int, Message]]] = defaultdict(deque)
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._store: Any = None  # where the ranks meet
        try:
            self._store = open_store()
            for rank in range(len(devices)):
                self._ranks.append(RankProcess(rank, step_timeout_s))
                self._selector.register(
                    self._ranks[rank].channel, selectors.EVENT_READ, self._ranks[rank]
                )
            self.backend_name: str
            self.has_graphs: bool
            pool, self.backend_name, self.has_graphs = self._start(
                config, folder, devices, start_timeout_s, meet_timeout_s
            )
            states = pool.pop("states")
            self.pool_size = PoolSize(**pool, states=None if states is None else StateRows(*states))
        except BaseException:
            self._kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.pid for rank in self._ranks]

    def launch(self, step: StepBatch, sampling: SamplingBatch) -> PendingTokens:
        """Send the step to the ranks, which compute it after the steps sent before.

        Raises RankFailed, here or from `wait`, and raises it again on every later call.
        """
        if self._failure is not None:
            raise self._failure
        with self._ending_on_failure():
            message = encode(Kind.STEP, arrays=pack_step(step, sampling, self._tables))
            for rank in self._ranks:
                self._send(rank, message)
        self._num_launched += 1
        return RankTokens(self, self._num_launched - 1)

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Have each rank load its share of an adapter. Raises AdapterRefused, or RankFailed as `launch` does."""
        if self._failure is not None:
            raise self._failure
        facts = (number, adapter.name, adapter.fingerprint, str(adapter.folder.resolve()))
        with self._ending_on_failure():
            for rank in self._ranks:
                self._send(rank, encode(Kind.ADAPTER, facts))
            ranks = {rank.rank for rank in self._ranks}
            answers = self._await(ranks, Kind.LOADED, self._step_timeout_s)
        for answer in answers.values():
            if answer.facts is not None:
                raise AdapterRefused(adapter.name, answer.facts)

    def receive_tokens(self, number: int) -> Tokens:
        """Wait for the TOKENS of step `number`. Raises RankFailed.

        The tokens of earlier steps are dropped: those steps were withdrawn.
        """
        with self._ending_on_failure():
            while self._num_answered <= number:
                message = self._await({0}, Kind.TOKENS, self._step_timeout_s)[0]
                self._num_answered += 1
        return unpack_tokens(message.arrays)

    def close(self) -> None:
        """Ask the ranks to stop, then kill those that still run. A second call does nothing."""
        message = encode(Kind.STOP)
        for rank in self._ranks:
            with suppress(OSError):
                rank.channel.send(message)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for rank in self._ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(
        self,
        config: EngineConfig,
        folder: Path,
        devices: list[str],
        timeout_s: float,
        meet_timeout_s: float,
    ) -> Any:
        """Send START to each rank, and wait until all have met and loaded.

        Returns what rank 0 reports: the size of the pool, the backend's name, and whether it has graphs.
        """
        assert self._store is not None
        order = {
            "folder": str(folder.resolve()),
            "port": self._store.port,
            "num_threads": max(1, torch.get_num_threads() // len(devices)),
        }
        # Asked on its own, a rank on a smaller GPU would run fewer sequences than the driver schedules.
        config = replace(config, max_num_seqs=config.num_seqs)
        for rank, device in zip(self._ranks, devices, strict=True):
            rank_order = {
                **order,
                "rank": rank.rank,
                "config": asdict(replace(config, device=device)),
            }
            self._send(rank, encode(Kind.START, rank_order))
        ranks = set(range(len(devices)))
        self._await(ranks, Kind.ARRIVED, timeout_s)
        silence = (
            f"it did not meet the other ranks within {meet_timeout_s:g} s; their devices may not reach each other: "
            "NCCL_DEBUG=INFO says more, NCCL_P2P_DISABLE=1 goes through the host's memory"
        )
        self._await(ranks, Kind.MET, meet_timeout_s, silence)
        return self._await(ranks, Kind.READY, timeout_s)[0].facts

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """End all ranks on any error inside, also a KeyboardInterrupt. Later calls raise the error again."""
        try:
            yield
        except BaseException as error:
            interrupted = RankFailed(0, f"its step was interrupted by {error!r}")
            self._failure = error if isinstance(error, EngineError) else interrupted
            self._kill()
            raise

    def _send(self, rank: RankProcess, message: bytes) -> None:
        try:
            rank.channel.send(message)
        except TimeoutError:
            raise RankFailed(rank.rank, "it does not read what it is sent") from None
        except OSError:
            while isinstance(reply := self._read(rank), Message):
                pass  # a message that the rank sent before it failed; its last reply says why
            raise self._blame(reply) from None

    def _await(
        self, waited_for: set[int], kind: Kind, timeout_s: float, silence: str = ""
    ) -> dict[int, Message]:
        """Wait for a message of this kind from each rank of `waited_for`.

        Raises a failed rank's error, or RankFailed after timeout_s. silence: the reason that this RankFailed gives.
        """
        deadline = time.monotonic() + timeout_s
        received = self._take_early(waited_for, kind)
        while missing := waited_for - received.keys():
            if time.monotonic() > deadline:
                first, *others = sorted(missing)
                problem = silence or f"no answer in {timeout_s:.0f} s, or a rank it waits for hangs"
                if others:  # one of them may hang, and the others wait for it
                    problem += f" (no answer from {_list_ranks(others)} either)"
                raise RankFailed(first, problem)
            for rank in self._readable(deadline):
                reply = self._read(rank)
                if isinstance(reply, EngineError):
                    raise self._blame(reply)
                if reply.kind is kind:
                    received[rank.rank] = reply
                    continue
                assert reply.kind in _EARLY.get(kind, ()), (
                    f"rank {rank.rank} sent {reply.kind.name} for {kind.name}"
                )
                self._early[reply.kind].append((rank.rank, reply))
        return received

    def _take_early(self, ranks: set[int], kind: Kind) -> dict[int, Message]:
        """Take the first early message of a kind from each of these ranks that has sent one."""
        taken: dict[int, Message] = {}
        left: deque[tuple[int, Message]] = deque()
        for rank, message in self._early[kind]:
            if rank in ranks and rank not in taken:
                taken[rank] = message
            else:
                left.append((rank, message))
        self._early[kind] = left
        return taken

    def _readable(self, deadline: float) -> Iterator[RankProcess]:
        """Wait until a rank sends something or ends, or until the deadline; yield each rank that did."""
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            yield key.data

    def _read(self, rank: RankProcess) -> Message | EngineError:
        """Return the rank's next message, or its failure. After a failure nothing more is read from the rank."""
        try:
            message = rank.channel.receive()
        except (EOFError, OSError):
            failure: EngineError = RankFailed(rank.rank, rank.describe_end())
        else:
            if message.kind is not Kind.ERROR:
                return message
            failure = _reported(rank.rank, *message.facts)
        self._selector.unregister(rank.channel)
        return failure

    def _blame(self, error: EngineError) -> EngineError:
        """Return the error of the rank that failed first: a rank whose collective broke may only be a victim."""
        deadline = time.monotonic() + BLAME_TIMEOUT_S
        while isinstance(error, RankIsVictim) and time.monotonic() < deadline:
            if not self._selector.get_map():
                break  # every channel is closed: no rank can report any more
            for rank in self._readable(deadline):
                other = self._read(rank)
                if isinstance(other, EngineError) and not isinstance(other, RankIsVictim):
                    error = other
        return RankFailed(*error.args) if isinstance(error, RankIsVictim) else error

    def _kill(self) -> None:
        """End the ranks that still run, and give the port back."""
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()
        self._selector.close()
        self._store = None


def _list_ranks(ranks: list[int]) -> str:
    """Return "rank 2", or "ranks 2, 3"."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def check_split(model: ModelConfig, size: int) -> None:
    """Raise ConfigError, naming tensor_parallel_size, unless `size` ranks can share the model."""
    tp = TensorParallel(size=size)
    tp.share(model.num_heads, "attention heads")
    tp.share_or_copy(model.num_kv_heads, "KV heads")
    tp.share(model.intermediate_size, "MLP features")


def rank_devices(config: EngineConfig) -> list[str]:
    """Return the device of each rank. Raises ConfigError if there are too few GPUs."""
    device = resolve_device(config.device)
    size = config.tensor_parallel_size
    if device.type == "cpu":
        return ["cpu"] * size
    if ":" in config.device:
        raise ConfigError(
            f"device={config.device!r} is one GPU and tensor_parallel_size={size} needs {size}; use 'cuda' "
            "and choose them with CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} GPUs, torch finds {torch.cuda.device_count()}"
        )
    return [f"cuda:{rank}" for rank in range(size)]


logger = logging.getLogger(__name__)


StartRunner = Callable[[EngineConfig, ModelConfig, Path], Runner]


def start_own_runner(config: EngineConfig, model: ModelConfig, folder: Path) -> Runner:
    """Load the model here, or start ranks that share it, once its GPU kernels are known to work."""
    path = choose_path(model, config.model_path)
    if path.is_single_pass:
        return SinglePassRunner(config, model, folder)
    config = with_checked_kernels(config, model, path, folder)
    if config.tensor_parallel_size > 1:
        runner: Runner = RankGroup(config, model, folder)
    else:
        runner = ModelRunner(config, model, folder, TensorParallel())
    size = runner.pool_size
    logger.info(
        "KV pool: %d blocks of %d tokens, %.2f GiB on each rank; sequences of up to %d tokens",
        size.num_blocks, config.block_size, size.num_bytes / 2**30, size.max_model_len,
    )  # fmt: skip
    return runner
