"""Parts of a step between states: which wait for which, and the table that graphs read."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.state_pool import StateTable, find_waves, state_parts

CPU = torch.device("cpu")
ROW = st.integers(0, 5)
NO_ROW = st.just(-1)


@given(st.integers(0, 3), st.lists(st.tuples(ROW | NO_ROW, ROW, ROW | NO_ROW), max_size=12))
def test_a_part_waits_for_what_it_reads_and_writes_and_for_nothing_else(
    num_decodes: int, rows: list[tuple[int, int, int]]
) -> None:
    moves = [(10 + row, 10 + row, -1) for row in range(num_decodes)] + rows
    parts = np.array([(2 * i, 2 * i + 2, *each) for i, each in enumerate(moves)]).reshape(-1, 5)
    parts[:num_decodes, 1] -= 1
    waves = find_waves(parts).tolist()
    for i, (source, *targets) in enumerate(moves):
        written = set(targets) - {-1}
        least = 0
        for j, (other_source, *other_targets) in enumerate(moves[:i]):
            other_written = set(other_targets) - {-1}
            if other_written & {source, *written} or other_source in written:
                least = max(least, waves[j] + 1)
        assert waves[i] == least


def test_prompts_that_begin_at_one_snapshot_are_computed_side_by_side() -> None:
    """A decode; a prompt that makes the snapshot, and goes on; two that begin there."""
    moves = [(0, 1, 3, 3, -1), (1, 9, -1, 0, 7), (9, 12, 0, 0, -1), (12, 20, 7, 1, -1)]
    moves.append((20, 30, 7, 2, -1))
    parts = state_parts(np.array(moves), CPU)
    assert parts.decodes.tolist() == [3]
    assert [list(wave) for wave in parts.waves] == [[0, 1], [2, 3, 4]]
    assert parts.table.tolist() == [list(each) for each in moves]


def test_parts_of_one_wave_stand_together() -> None:
    """A prompt with a snapshot, then one that waits for nothing."""
    moves = [(0, 4, -1, 0, 7), (4, 6, 0, 0, -1), (6, 9, -1, 1, -1)]
    parts = state_parts(np.array(moves), CPU)
    assert parts.table[:, 0].tolist() == [0, 6, 4]
    assert [part.start for part in parts.others] == [0, 6, 4]
    assert [list(wave) for wave in parts.waves] == [[0, 1], [2]]


def test_the_table_of_a_graph_holds_a_steps_rows_and_padding() -> None:
    table = StateTable(4, CPU)
    table.write(np.array([(0, 1, 5, 5, -1), (1, 2, 8, 6, 9)]), np.array([1, 0]))
    assert table.first(3).table.tolist() == [[0, 1, 8, 6, 9], [1, 2, 5, 5, -1], [2, 3, -1, -1, -1]]
    table.write(np.array([(0, 1, 6, 6, -1)]), np.array([0]))
    assert table.first(2).table.tolist() == [[0, 1, 6, 6, -1], [1, 2, -1, -1, -1]]


def test_a_step_without_states_has_no_waves() -> None:
    assert find_waves(np.zeros((0, 5), np.int64)).tolist() == []
