"""Defines what a kind of scoring is. Each kind is written once, for jobs and for rows of runs."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from jobs.context.adapters import ADAPTER
from jobs.context.served_model import ServedModel
from jobs.errors import wrong_value_error
from jobs.prompts.arguments import Prompt, Unusable
from jobs.prompts.generated import NO_REASON
from jobs.prompts.messages import ChatOptions
from jobs.tasks import Completion, Request

#: The sampling value that says how many tokens of a prompt are read, counted from its end. Prompts for which nothing is
#: generated have no other sampling value than this one and an adapter.
TRUNCATION = "truncate_prompt_tokens"

#: The most probabilities of all rows of a shard. Each takes 88 bytes, and all are in memory until the part is written.
MAX_PROBABILITIES = 4_000_000


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of a prompt. values: the values by the names of their columns. error: why there are no values."""

    values: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Scoring(abc.ABC):
    """Makes the request for a prompt, and reads the numbers in its completion.

    values: the sampling values of the requests; see engine.ScoringParams, PoolingParams and ClassParams.
    kind: see Request.kind.
    columns: the columns of a row's answer, with Arrow's names of their types. The type "probabilities" is a map from
    texts to numbers. The type "embedding" is a list of float32.
    run_sampling_names: the names of the sampling values that a run may have.
    asks_pairs: whether a prompt is a pair of texts.
    is_tried: whether preview and dry run score some rows. is_compared: whether `verify` compares the values.
    """

    values: Mapping[str, Any]

    kind: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    run_sampling_names: ClassVar[tuple[str, ...]] = (TRUNCATION, ADAPTER)
    asks_pairs: ClassVar[bool] = False
    is_tried: ClassVar[bool] = False
    is_compared: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def of_run(cls, options: Mapping[str, Any], model: ServedModel) -> Self:
        """Return the scoring of a run. options: the run's options; see RunSpec."""

    @classmethod  # noqa: B027 - labels need no check here, so an empty method is right for them
    def check_served(cls, options: Mapping[str, Any], model: ServedModel) -> None:
        """Raise InvalidJob if the model cannot score in this way, or a shard of the run would hold too many values.

        options: the run's options; see RunSpec.
        """

    def request(self, prompt: Any, chat_options: ChatOptions | None = None) -> Request | Unusable:
        """Return the request for a prompt. chat_options: None unless the prompt is the messages of a chat."""
        if chat_options is None:
            return Request(prompt=prompt, messages=None, sampling=self.values, kind=self.kind)
        return Request(
            prompt=None,
            messages=prompt,
            sampling=self.values,
            chat_options=chat_options,
            kind=self.kind,
        )

    def requests(self, prompts: Sequence[Prompt | Unusable]) -> list[Request | Unusable]:
        """Return a request for each prompt. An Unusable prompt is returned as it is."""
        requests: list[Request | Unusable] = []
        for prompt in prompts:
            if isinstance(prompt, Unusable):
                requests.append(prompt)
            else:
                requests.append(self.request(prompt))
        return requests

    @abc.abstractmethod
    def scored(self, completion: Completion) -> Scored:
        """Return the result of a prompt, from its completion."""

    def calibrated(self, completion: Completion) -> Self:
        """Return a scoring that corrects its results by the completion of a prompt without content.

        By default, results are not corrected.
        """
        return self


def unscored(completion: Completion) -> Scored:
    """Return the result of a completion that has no numbers to score: an error and no values."""
    return Scored(error=completion.error or NO_REASON)


def truncation(value: object) -> dict[str, int]:
    """Return `truncate_prompt_tokens` as a sampling value; {} for None. Raises InvalidJob."""
    if value is None:
        return {}
    if type(value) is int and (value >= 1 or value == -1):
        return {TRUNCATION: value}
    raise wrong_value_error(TRUNCATION, value, "a number of tokens, or -1 for as many as fit")
