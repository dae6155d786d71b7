"""A run's progress as a bar, on a terminal or in a notebook."""

import sys
from typing import TextIO

from tqdm import tqdm
from tqdm.auto import tqdm as tqdm_for_notebooks

from jobs.common.display import plural
from jobs.runs.watching.snapshot import RunSnapshot, left_text

#: tqdm's format without its estimate of the time left. That estimate takes all rows as equal, but rows may get longer.
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Bar:
    """Shows a run's progress as a bar.

    file: the terminal that shows the bar. By default, the bar is in the notebook, or on stderr outside of a notebook.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        # The class for notebooks draws an ordinary bar outside of a notebook.
        bar_class = tqdm_for_notebooks if file is None else tqdm
        self._bar = bar_class(
            unit="row",
            total=0,
            dynamic_ncols=True,
            desc="planning",
            file=self._file,
            bar_format=BAR_FORMAT,
        )

    def show(self, snapshot: RunSnapshot) -> None:
        """Show a run's progress."""
        if snapshot.rows is not None:
            self._bar.total = snapshot.rows
            self._bar.n = snapshot.rows_done
        self._bar.set_description_str(snapshot.state, refresh=False)
        self._bar.set_postfix_str(speed_text(snapshot), refresh=False)
        self._bar.refresh()

    def warn(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text, file=self._file)

    def close(self) -> None:
        """End the bar: it stays on the screen, and later output begins on a new line."""
        self._bar.close()


def speed_text(snapshot: RunSnapshot) -> str:
    """Return a run's speed, its time left and its number of failed shards as one text; "" if nothing is known."""
    texts = []
    if snapshot.tokens_per_s is not None:
        texts.append(f"{snapshot.tokens_per_s:.0f} tok/s")
    time_left = left_text(snapshot)
    is_duration = snapshot.left_s is not None and not snapshot.is_stalled
    if time_left and is_duration:  # the text is not "estimating" or "stalled for ..."
        time_left = f"{time_left} left"
    if time_left:
        texts.append(time_left)
    if snapshot.failed_jobs:
        num_failed = len(snapshot.failed_jobs)
        texts.append(f"{num_failed} {plural('shard', num_failed)} failed")
    return ", ".join(texts)
