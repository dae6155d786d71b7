"""Dry runs of what records CUDA graphs: on a CPU a recorded step is called again over the same buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.engine.graphs import simulate_graphs, simulate_mixed_graphs
from tests.engine.interpreter import patch_language_once_a_launch


@contextmanager
def graphs_on_cpu(*, wanted: bool, with_prompts: bool = False) -> Iterator[None]:
    """Within it engines on a CPU record their decode steps, if wanted. with_prompts: steps with prompts too."""
    if not wanted:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        simulate_graphs(patch)
        if with_prompts:
            simulate_mixed_graphs(patch)
        patch_language_once_a_launch(patch)
        yield
