"""What a sequence learns with a sampled token while others are forced, and which pending samples are of no use then."""

from collections.abc import Iterable, Mapping

from engine import SamplingParams
from engine.schedule.sequence import ENDS, GOES_ON, Learned, Sequence

PROMPT = [1, 2, 3]


class ForcedBehind:
    """Forces tokens behind others."""

    def __init__(self, forced: Mapping[int, list[int]], first: Iterable[int] = ()) -> None:
        self._forced = forced
        self._first = first

    def first(self) -> Iterable[int]:
        return self._first

    def after(self, token_id: int, num_left: int) -> Iterable[int]:
        return self._forced.get(token_id, [])


def sequence(forcing: ForcedBehind | None, *, num_pending: int = 1, **values: int) -> Sequence:
    """Return a sequence with pending samples."""
    params = SamplingParams(**{"max_tokens": 8, **values})  # type: ignore[arg-type]
    seq = Sequence("it", PROMPT, params, forcing=forcing, stop_token_ids=frozenset([9]))
    seq.num_tokens += num_pending
    return seq


def test_a_sampled_token_is_learned_alone_if_nothing_is_forced() -> None:
    for forcing in (None, ForcedBehind({})):
        seq = sequence(forcing)
        assert seq.learn(5) == GOES_ON
        assert seq.generated_token_ids == [5]
        assert seq.learn(9) == ENDS
        assert seq.finish_reason == "stop"


def test_all_forced_tokens_behind_a_sampled_one_are_learned_with_it() -> None:
    seq = sequence(ForcedBehind({5: [6, 7], 7: [8]}), num_pending=3)
    assert seq.learn(5) == Learned(ends=False, num_right=len(PROMPT) + 1, num_dropped=2)
    assert seq.generated_token_ids == [5, 6, 7, 8]


def test_a_forced_token_stands_in_the_place_of_the_sampled_one() -> None:
    seq = sequence(ForcedBehind({}, first=[6]))
    assert seq.learn(5) == Learned(ends=False, num_right=len(PROMPT), num_dropped=0)
    assert seq.generated_token_ids == [6]


def test_a_sequence_ends_among_forced_tokens() -> None:
    seq = sequence(ForcedBehind({5: [6, 9, 7]}))
    assert seq.learn(5) == ENDS
    assert seq.generated_token_ids == [5, 6, 9]


def test_forced_tokens_whose_log_probabilities_are_wanted_are_sampled_one_by_one() -> None:
    seq = sequence(ForcedBehind({5: [6, 7]}), logprobs=0)
    assert seq.learn(5) == GOES_ON
    assert (seq.generated_token_ids, seq.forced_sample) == ([5], 6)
    seq.num_tokens += 1
    assert seq.forced_sample == 7
    assert seq.learn(6) == GOES_ON
    assert seq.generated_token_ids == [5, 6]


def test_pending_samples_that_did_not_know_of_the_forced_tokens_are_dropped() -> None:
    """The second sample was launched before the first one forced it."""
    seq = sequence(ForcedBehind({5: [6]}), num_pending=2, logprobs=0)
    assert seq.learn(5) == Learned(ends=False, num_right=len(PROMPT) + 1, num_dropped=1)
    assert seq.generated_token_ids == [5]


def test_an_error_ends_the_sequence() -> None:
    seq = sequence(None)
    assert seq.learn(-1) == ENDS
    assert seq.finish_reason == "error"
