"""What a launched step gives at once: its tokens, before anyone knows them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PendingTokens(ABC):
    """The tokens of a launched step; steps are launched in order and waited for in the same order."""

    @abstractmethod
    def wait(self) -> NDArray[np.int64]:
        """Wait until they are here: [samples] int64. Raises what the step raised on its device."""


class DeviceTokens(PendingTokens):
    """On their way from the device: one copy into pinned memory, queued behind the step that samples them."""

    def __init__(self, token_ids: Tensor) -> None:
        """token_ids: [samples] int64, on the device or on the CPU."""
        self._event: torch.cuda.Event | None = None
        self._host = token_ids
        if token_ids.is_cuda:
            self._host = torch.empty_like(token_ids, device="cpu", pin_memory=True)
            self._host.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> NDArray[np.int64]:
        if self._event is not None:
            self._event.synchronize()
        token_ids: NDArray[np.int64] = self._host.numpy()
        return token_ids
