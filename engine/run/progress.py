"""A progress bar for `Engine.generate`."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from engine.schedule.sequences.outputs import Completion


class Progress:
    """Counts finished prompts and generated tokens; shows nothing unless enabled. tqdm's own rate and ETA."""

    def __init__(self, total: int | None, *, enabled: bool) -> None:
        self._bar: Any = None
        self._num_tokens = 0
        if enabled:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="prompt", dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, completion: Completion, *, finished: bool) -> None:
        """Count one completion; `finished` says that it is the last one of its prompt."""
        if self._bar is None:
            return
        self._num_tokens += len(completion.token_ids)
        seconds = self._bar.format_dict["elapsed"] or 1.0
        self._bar.set_postfix_str(f"{self._num_tokens / seconds:.0f} tok/s", refresh=False)
        self._bar.update(int(finished))
