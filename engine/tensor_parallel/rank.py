"""A rank's process: load a share of the model, then compute the steps that the driver sends."""

import logging
import os
import socket
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import torch

from engine.checkpoint.adapter_folder import Adapter
from engine.checkpoint.model_config import read_model_config
from engine.errors import AdapterRefused, CollectiveFailed, ConfigError
from engine.run.config import EngineConfig
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.runner import PendingTokens
from engine.tensor_parallel.block_tables import KeptTables
from engine.tensor_parallel.collectives import join_ranks
from engine.tensor_parallel.messages import Channel, Kind, encode, pack_tokens, unpack_step


def main(descriptor: int) -> NoReturn:
    """Serve the driver at the other end of this socket until it sends STOP.

    An error is reported to the driver, and then the process ends with status 1.
    """
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        order = channel.receive().facts
        runner = _start(channel, order)
        facts = (asdict(runner.pool_size), runner.backend_name, runner.has_graphs)
        channel.send(encode(Kind.READY, facts))
        _serve(channel, runner, EngineConfig(**order["config"]), order["rank"])
        runner.close()  # its graphs hold the process group's communicators
    except EOFError:
        os._exit(1)  # the driver has ended
    except Exception as error:  # noqa: BLE001  # the driver raises it, whatever it is
        _give_up(channel, error)
    torch.distributed.destroy_process_group()
    # Python's own clean-up of torch takes a second and frees nothing that the end does not.
    os._exit(0)


def _start(channel: Channel, order: dict[str, Any]) -> ModelRunner:
    """Join the other ranks and load this rank's share of the model. order: the facts of RankGroup's START.

    The driver is told before and after the ranks meet, so that it knows which rank is missing.
    """
    rank = order["rank"]
    config = EngineConfig(**order["config"])
    folder = Path(order["folder"])
    if rank:
        logging.disable(logging.WARNING)  # all ranks would log the same, so only rank 0 does
    torch.set_num_threads(order["num_threads"])
    model = read_model_config(folder)
    channel.send(encode(Kind.ARRIVED))
    tp = join_ranks(rank, config.tensor_parallel_size, order["port"], torch.device(config.device))
    tp.minimum(rank)  # the first collective of all ranks: it shows whether they reach each other
    channel.send(encode(Kind.MET))
    return ModelRunner(config, model, folder, tp)


def _serve(channel: Channel, runner: ModelRunner, config: EngineConfig, rank: int) -> None:
    """Compute the steps and load the adapters that the driver sends, until it sends STOP."""
    answers: SimpleQueue[PendingTokens | None] = SimpleQueue()
    sender = threading.Thread(
        target=_send_all, args=(channel, answers), name="rank-answers", daemon=True
    )
    sender.start()
    tables = KeptTables(config.num_seqs, runner.pool_size.max_model_len, config.block_size)
    while (message := channel.receive()).kind is not Kind.STOP:
        if message.kind is Kind.ADAPTER:
            channel.send(encode(Kind.LOADED, _load_adapter(runner, *message.facts)))
            continue
        tokens = runner.launch(*unpack_step(message.arrays, tables))
        if rank == 0:
            answers.put(tokens)
    answers.put(None)
    sender.join()


def _load_adapter(
    runner: ModelRunner, number: int, name: str, fingerprint: str, folder: str
) -> str | None:
    """Load an adapter; return why it cannot be used, None if it can."""
    try:
        runner.load_adapter(number, Adapter(name, fingerprint, Path(folder)))
    except AdapterRefused as error:
        return error.problem
    except Exception as error:  # noqa: BLE001 - whatever one adapter's files make it raise
        return f"{type(error).__name__}: {error}"
    return None


def _send_all(channel: Channel, answers: SimpleQueue[PendingTokens | None]) -> None:
    """Send each step's tokens to the driver, while the main thread launches the next step. A None ends this."""
    try:
        while (pending := answers.get()) is not None:
            token_ids = pending.wait()
            tokens = token_ids, pending.logprobs, pending.pooled
            channel.send(encode(Kind.TOKENS, arrays=pack_tokens(tokens)))
    except Exception as error:  # noqa: BLE001  # as in main
        _give_up(channel, error)


def _give_up(channel: Channel, error: Exception) -> NoReturn:
    """Report the error and leave without the clean-up, which would wait for ranks that no longer answer."""
    if not isinstance(error, (ConfigError, CollectiveFailed)):
        traceback.print_exception(error)
    with suppress(OSError):
        channel.send(encode(Kind.ERROR, (type(error).__name__, str(error))))
    os._exit(1)
