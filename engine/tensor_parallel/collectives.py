"""Sums and gathers over torch.distributed, for TensorParallel of more than one rank."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

from engine.errors import CollectiveFailed
from engine.layers.parallel import TensorParallel

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# The driver notices a rank that ends long before, and ends the others.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class ProcessGroupParallel(TensorParallel):
    """One of several ranks, in the default process group of its process. Calls raise CollectiveFailed."""

    device: torch.device = field(kw_only=True)

    def all_reduce(self, partial: Tensor) -> Tensor:
        with _collective():
            dist.all_reduce(partial)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        if not part.numel():  # a step in which nothing samples: no rank has anything to send
            return part.new_empty(*part.shape[:-1], part.shape[-1] * self.size)
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        with _collective():
            dist.gather(part, parts)
        return part if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, values: Tensor) -> Tensor:
        if values.numel():  # in a step in which nothing samples there is nothing to send
            with _collective():
                dist.broadcast(values, src=0)
        return values

    def minimum(self, value: int) -> int:
        smallest = torch.tensor([value], device=self.device)
        with _collective():
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest.item())


def open_store() -> TCPStore:
    """Open the store at which the ranks of one engine meet: a port of its own, on loopback only.

    torch's own listener would be open to every interface, so it is given a bound socket.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_ranks(rank: int, size: int, port: int, device: torch.device) -> ProcessGroupParallel:
    """Meet the other ranks at the driver's store on this port, over loopback. Raises CollectiveFailed."""
    # torch and NCCL take the interface from the environment only; this process is the rank's own
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with _collective():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=TCPStore(LOOPBACK, port, is_master=False),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if on_gpu else None,
        )
    return ProcessGroupParallel(rank, size, device=device)


@contextmanager
def _collective() -> Iterator[None]:
    """Turn RuntimeError, torch's report of a lost peer or a timeout, into CollectiveFailed."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(f"a collective with the other ranks broke off: {error}") from error
