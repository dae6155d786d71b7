"""Lets each row have several prompts, one after the other. Their templates name columns and earlier answers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Self

from jobs.common.display import MAX_NAME_CHARS
from jobs.context.values import check_shard
from jobs.errors import InvalidJob, check_limit, wrong_value_error
from jobs.prompts.arguments import parse_sampling, refuse_chat_options
from jobs.prompts.messages import ChatOptions, forces_call, split_chat_options
from jobs.prompts.responses import LOGPROBS, run_values
from jobs.prompts.scoring.labels import Labels
from jobs.prompts.template_texts import template_texts
from jobs.runs.plans.names import LOG_COLUMNS
from jobs.runs.plans.option_checks import PROMPT_VALUES, refuse_generation_values

#: The most literals and values that a shard's prompts are made of. A thread joins this many in some seconds.
MAX_SHARD_PIECES = 20_000_000
#: A text that is cut into pairs: a literal, and the column whose value follows the literal, or None.
Pieces = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Template:
    """A text with the names of columns in braces, or a chat of such texts.

    Braces may hold plain column names only: no attribute, index, conversion or format. The template is part of a job,
    and jobs are not trusted. A value is never parsed again, so braces in the data are harmless.
    """

    texts: tuple[Pieces, ...]
    roles: tuple[str, ...] | None  # None stands for a single prompt text

    @classmethod
    def parse(cls, template: Any) -> Self:
        """Parse a text, or a list of {'role', 'content'} with texts as content. Raises InvalidJob."""
        texts, roles = template_texts(template)
        if roles is None:
            [text] = texts
            return cls(texts=(_parse_text(text, "the template"),), roles=None)
        pieces = [
            _parse_text(text, f"message {number} of the template")
            for number, text in enumerate(texts)
        ]
        return cls(texts=tuple(pieces), roles=roles)

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that the template names, each once."""
        columns: dict[str, None] = {}
        for text in self.texts:
            for _, column in text:
                if column is not None:
                    columns[column] = None
        return tuple(columns)

    def check_cost(self, rows: int) -> None:
        """Raise InvalidJob if the prompts of a shard with `rows` rows have more than MAX_SHARD_PIECES pieces."""
        num_pieces = sum(map(len, self.texts))
        check_shard(num_pieces, "pieces of the template", rows, MAX_SHARD_PIECES)

    def filled_chars(self, values: Mapping[str, object]) -> int:
        """Return how many characters `fill` would return. A template may repeat a long value, so this may be huge."""
        sizes: dict[str | None, int] = {None: 0}  # None: no column follows the literal
        for column, value in values.items():
            sizes[column] = len(f"{value}")
        num_chars = 0
        for text in self.texts:
            for literal, next_column in text:
                num_chars += len(literal) + sizes[next_column]
        return num_chars

    def fill(self, values: Mapping[str, object]) -> str | list[dict[str, str]]:
        """Return the prompt, or the messages of a chat, with the values in place of their columns' names."""
        value_texts: dict[str | None, str] = {None: ""}  # None: no column follows the literal
        for column, value in values.items():
            value_texts[column] = f"{value}"
        filled_texts = []
        for text in self.texts:
            pieces = [literal + value_texts[next_column] for literal, next_column in text]
            filled_texts.append("".join(pieces))
        if self.roles is None:
            return filled_texts[0]
        messages = []
        for role, content in zip(self.roles, filled_texts, strict=True):
            messages.append({"role": role, "content": content})
        return messages


#: Advice about braces that hold no column name.
BRACES = "write {{ and }} for braces of text, or, for Jinja's, say template_format 'jinja' (--template-format jinja)"


def _parse_text(text: str, text_name: str) -> Pieces:
    """Cut a text at its braces.

    text_name: the text's name in errors, which never quote the text.
    """
    pieces: list[tuple[str, str | None]] = []
    try:
        for literal, column, form, conversion in Formatter().parse(text):
            is_name = column is None or _is_column_name(column)
            if form or conversion or not is_name:
                names_before = [name for _, name in pieces if name is not None]
                number = len(names_before) + 1
                raise InvalidJob(f"{text_name}: field {number} is no plain column name; {BRACES}")
            pieces.append((literal, column))
    except ValueError as error:
        raise InvalidJob(f"{text_name}: {error}; {BRACES}") from None
    return tuple(pieces)


def _is_column_name(text: str) -> bool:
    """Whether the text between braces is a plain column name."""
    if not 0 < len(text) <= MAX_NAME_CHARS:
        return False
    if set(text) & set(".[]"):  # the text has an attribute or an index
        return False
    is_jinja_tag = text.startswith("%") and text.endswith("%")
    return not is_jinja_tag


#: The most prompts of a row. Each prompt waits for the answer to the prompt before it.
MAX_STEPS = 20

#: Columns that the output has once, however many prompts a row has.
ROW_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens", "error")
#: The longest text that follows a prompt's name in the name of a column.
LONGEST_ENDING = "_prompt_logprobs"


def answer_columns(sampling: Mapping[str, Any], *, has_tools: bool) -> list[str]:
    """Return the names of the columns of one answer. The columns' types are in jobs/parquet/asks/ask.py."""
    names = ["completion", "finish_reason"]
    if sampling.get("separate_reasoning"):
        names.append("reasoning")
    if has_tools:
        names += ["tool_calls", "tool_call_error"]
    for name in LOGPROBS:
        if sampling.get(name) is not None:
            names.append(name)
    return names


@dataclass(frozen=True)
class PromptStep:
    """One of a row's prompts.

    sampling: the prompt's sampling values, merged with the run's values. chat: the options of a chat.
    is_scored: whether the prompt is scored against labels.
    """

    name: str
    template: Template
    sampling: Mapping[str, Any]
    chat: ChatOptions
    is_scored: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the template is a chat."""
        return self.template.roles is not None

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that the output has for this prompt, each with the field of the answer that it holds.

        For example, for the prompt `summary`: {"summary": "completion", "summary_finish_reason": "finish_reason"}.
        """
        if self.is_scored:
            return {name: name for name in Labels.columns}
        columns = {}
        for answer_column in answer_columns(self.sampling, has_tools="tools" in self.chat):
            column = self.name if answer_column == "completion" else f"{self.name}_{answer_column}"
            columns[column] = answer_column
        return columns


def parse_prompts(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a run's prompts as mappings of name, template and, if any, sampling. Raises InvalidJob."""
    if not isinstance(value, list) or not value:
        raise wrong_value_error(
            name, value, 'a list such as [{"name": "summary", "template": "..."}, ...]'
        )
    check_limit(len(value), MAX_STEPS, "prompts has {} entries")
    return [_parse_prompt(prompt, number) for number, prompt in enumerate(value)]


def _parse_prompt(value: Any, number: int) -> dict[str, Any]:
    """Check one of a run's prompts, and return it in one form. number: the prompt's index, for errors."""
    has_keys = isinstance(value, dict) and "name" in value and "template" in value
    has_other_keys = has_keys and bool(value.keys() - {"name", "template", "sampling"})
    if not has_keys or has_other_keys:
        raise wrong_value_error(
            f"prompts[{number}]", value, "an object with name, template and optionally sampling"
        )
    name = value["name"]
    max_chars = MAX_NAME_CHARS - len(LONGEST_ENDING)
    if not isinstance(name, str) or not name.isidentifier() or len(name) > max_chars:
        expected = f"a word of letters, digits and _, at most {max_chars} characters"
        raise wrong_value_error(f"the name of prompts[{number}]", name, expected)

    template_texts(value["template"])  # raises for a template of another form

    sampling = value.get("sampling")
    if sampling is None:
        sampling = {}
    if not isinstance(sampling, dict):
        raise wrong_value_error(f"the sampling of prompt {name!r}", sampling, "a mapping")
    for key in ("n", "seed"):
        if sampling.get(key) is not None:
            raise InvalidJob(
                f"prompt {name!r} has its own {key}, but all prompts of a run have the same {key}"
            )

    prompt = {"name": name, "template": value["template"]}
    if sampling:
        prompt["sampling"] = sampling
    return prompt


#: A shard's prompts and answers are held in memory until its part is written.
MAX_ROWS_PER_SHARD = 1_000_000


def run_sampling(value: Any, rows_per_shard: int, *, is_chat: bool) -> dict[str, Any]:
    """Check a run's sampling values, and return them without values that change nothing. Raises InvalidJob.

    Equal values get one form, so that equal runs have one id. For example, 0.0 becomes 0.
    """
    if not isinstance(value, dict):
        raise wrong_value_error(
            "sampling",
            value,
            "a mapping: on the command line write sampling:='{\"max_tokens\": 64}'",
        )
    sampling = parse_sampling(value)
    if is_chat:
        split_chat_options(sampling)  # raises for options that are not valid
    else:
        refuse_chat_options(sampling)

    sampling = dict(run_values(sampling))
    for name, number in sampling.items():
        # Below 2**53, floats hold whole numbers exactly.
        if isinstance(number, float) and number.is_integer() and abs(number) < 2**53:
            sampling[name] = int(number)

    n = sampling.get("n", 1)
    if isinstance(n, int):
        check_shard(n, "completions of a row", rows_per_shard, MAX_ROWS_PER_SHARD)
    if isinstance(sampling.get("logit_bias"), dict):  # the plan is JSON, and keys of JSON are texts
        sampling["logit_bias"] = {str(key): bias for key, bias in sampling["logit_bias"].items()}
    return sampling


def make_steps(
    prompts: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    from_columns: Collection[str],
    rows_per_shard: int,
    has_labels: bool = False,
) -> tuple[PromptStep, ...]:
    """Check and return the prompts of a run. Raises InvalidJob.

    from_columns: names of sampling values that come from columns. has_labels: whether the last prompt is scored against
    labels.
    """
    if sampling.get("n", 1) != 1:
        raise InvalidJob(
            "n must be 1 if a row has several prompts, because several answers cannot fill in a template"
        )
    steps = []
    for number, prompt in enumerate(prompts, 1):
        name = prompt["name"]
        template = Template.parse(prompt["template"])
        template.check_cost(rows_per_shard)
        is_chat = template.roles is not None

        # The prompt's values are parsed before they are merged with the run's values, so that both use the same names.
        prompt_sampling = run_sampling(
            prompt.get("sampling") or {}, rows_per_shard, is_chat=is_chat
        )
        in_both = sorted(prompt_sampling.keys() & from_columns)
        if in_both:
            raise InvalidJob(
                f"{in_both[0]} comes from a column, and prompt {name!r} has its own: leave one out"
            )

        is_scored = has_labels and number == len(prompts)
        values_of_run = dict(sampling)
        if is_scored:
            refuse_generation_values(
                prompt_sampling,
                request="labels",
                allowed=PROMPT_VALUES,
                owner=f"the sampling of prompt {name!r}",
            )
            values_of_run = _values_for_scoring(sampling)

        merged = run_sampling({**values_of_run, **prompt_sampling}, rows_per_shard, is_chat=is_chat)
        values, chat = split_chat_options(merged)
        steps.append(PromptStep(name, template, values, chat, is_scored))
    _check_names(steps)
    return tuple(steps)


def _values_for_scoring(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's sampling values that a scored prompt can have.

    Values that shape generated answers are left out.
    """
    names = set(PROMPT_VALUES)
    if forces_call(sampling):
        names.discard("tool_choice")  # a forced tool call has to be generated
    return {name: value for name, value in sampling.items() if name in names}


def _check_names(steps: Sequence[PromptStep]) -> None:
    """Raise InvalidJob if two columns would have the same name, or a template names a later prompt's answer."""
    taken_names = {*ROW_COLUMNS, *LOG_COLUMNS, "reused", "check_error"}
    for step in steps:
        for column in step.columns:
            if column in taken_names:
                raise InvalidJob(
                    f"prompt {step.name!r} has a column {column!r}, which is there already: rename the prompt"
                )
            taken_names.add(column)
    for number, step in enumerate(steps):
        columns = step.template.columns
        if not columns:
            raise InvalidJob(
                f"the template of prompt {step.name!r} names no column and no earlier prompt, so that every "
                "row would ask the same: write {column} where a row's value goes"
            )
        for unanswered_step in steps[number:]:  # this prompt and all later ones
            if unanswered_step.name in columns:
                raise InvalidJob(
                    f"the template of prompt {step.name!r} names {unanswered_step.name!r}, which has no "
                    "answer yet there: name columns and earlier prompts"
                )
