"""Checks the arguments of a run, and makes the run's id from them.

The CLI uses this module without pyarrow, so this module does not import it.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property, partial
from hashlib import blake2b
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context.adapters import ADAPTER
from jobs.context.checks import DEFAULT_MAX_ATTEMPTS, PARSERS, Checks, RepairOptions
from jobs.context.values import column_name, one_of, share, some_text, truth, whole_number
from jobs.errors import InvalidJob, InvalidValue, check_limit, wrong_value_error
from jobs.prompts.arguments import parse_model
from jobs.prompts.generated import check_repairs
from jobs.prompts.messages import ChatArguments, split_chat_options
from jobs.prompts.responses import LOGPROBS
from jobs.prompts.scoring.labels import parse_labels
from jobs.prompts.template_texts import template_texts
from jobs.prompts.ways.table import WAY_OPTIONS, check_way_fits, split_way, way_of
from jobs.prompts.ways.way import Way
from jobs.runs.plans import option_checks as checks
from jobs.runs.plans import prompt_steps
from jobs.runs.plans.dialects import DIALECT, parse_decimal, parse_delimiter, parse_encoding
from jobs.runs.plans.names import CSV, JSONL, OPENAI_BATCH, PARTS, SUFFIXES, parse_single_file
from jobs.runs.plans.paths import real_path, run_path
from jobs.runs.plans.schema_types import ValueType, type_of_schema

#: The most files that an input may name. Planning opens them one by one, and every shard's worker holds the list.
MAX_FILES = 100_000
#: The column that is completed if no source of prompts is named. An argument may name it beside another source.
DEFAULT_PROMPT_COLUMN = "prompt"


def _inputs(name: str, value: Any) -> list[str]:
    """Return the paths of a run's input. Raises InvalidJob or UnsupportedScheme."""
    items = value if isinstance(value, list) else [value]
    if not items:
        raise InvalidJob(f"{name} is an empty list: name at least one file, folder or glob")
    check_num_files(len(items))
    return [run_path(item) for item in items]


def _prefix(name: str, value: Any) -> str:
    """Return a prefix of column names, which may be empty. Raises InvalidValue."""
    return "" if value == "" else some_text(name, value, MAX_NAME_CHARS)


@dataclass(frozen=True)
class RunSpec:
    """The arguments of jobs.score_parquet in one normal form; equal arguments give equal run ids.

    A field with its default value is left out of the JSON and of the run's id. A field's annotation may hold a
    function. `from_arguments` calls the function with the field's name and the argument. The function checks the
    argument and returns the field's value.
    """

    input: Annotated[list[str], _inputs]
    output: Annotated[str, lambda _, value: real_path(run_path(value))]
    prompt_column: Annotated[str | None, column_name] = DEFAULT_PROMPT_COLUMN
    messages_column: Annotated[str | None, column_name] = None
    template: str | list[dict[str, str]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    rows_per_shard: Annotated[int, partial(whole_number, most=prompt_steps.MAX_ROWS_PER_SHARD)] = (
        1000
    )
    filename_column: Annotated[str | None, column_name] = None
    input_format: Annotated[str | None, partial(one_of, known=tuple(SUFFIXES))] = None
    single_file: Annotated[str | None, parse_single_file] = None
    keep: Annotated[list[str] | None, checks.column_names] = None
    drop: Annotated[list[str] | None, checks.column_names] = None
    output_prefix: Annotated[str, _prefix] = ""
    limit: Annotated[int | None, whole_number] = None
    sampling_columns: Annotated[dict[str, str], checks.sampling_columns] = field(
        default_factory=dict
    )
    defaults: Annotated[dict[str, str], checks.defaults] = field(default_factory=dict)
    template_format: Annotated[str, partial(one_of, known=checks.TEMPLATE_FORMATS)] = (
        checks.TEMPLATE_FORMATS[0]
    )
    prompts: Annotated[list[dict[str, Any]] | None, prompt_steps.parse_prompts] = None
    labels: Annotated[list[str] | None, parse_labels] = None
    calibrate: Annotated[bool, truth] = False
    check: Annotated[dict[str, Any] | None, PARSERS["check"]] = None
    check_columns: Annotated[list[str] | None, checks.column_names] = None
    max_attempts: Annotated[int, PARSERS["max_attempts"]] = DEFAULT_MAX_ATTEMPTS
    continue_on_length: Annotated[bool, PARSERS["continue_on_length"]] = False
    repair_template: Annotated[str | None, PARSERS["repair_template"]] = None
    way_options: dict[str, Any] = field(default_factory=dict)
    task: Annotated[str, partial(one_of, known=checks.TASKS)] = checks.GENERATE
    query_column: Annotated[str | None, column_name] = None
    document_column: Annotated[str | None, column_name] = None
    dimensions: Annotated[int | None, whole_number] = None
    prompt_name: Annotated[str | None, partial(some_text, most=MAX_NAME_CHARS)] = None
    model_alias: Annotated[list[str] | None, checks.model_alias] = None
    only_new: Annotated[bool, truth] = False
    reused_column: Annotated[str | None, column_name] = None
    order: Annotated[str | None, partial(one_of, known=("prefix",))] = None
    logprob_type: Annotated[str, partial(one_of, known=checks.LOGPROB_TYPES)] = (
        checks.LOGPROB_TYPES[0]
    )
    escalate_below: Annotated[float | None, share] = None
    escalate_to: Annotated[str | None, lambda name, value: check_queue_name(value, name)] = None
    escalate_model: Annotated[str | None, lambda _, value: parse_model(value)] = None
    image_column: Annotated[list[str] | None, checks.image_columns] = None
    encoding: Annotated[str | None, parse_encoding] = None
    delimiter: Annotated[str | None, parse_delimiter] = None
    decimal: Annotated[str | None, parse_decimal] = None
    inline_pictures: Annotated[bool, truth] = False
    batch_endpoint: Annotated[str | None, checks.batch_endpoint] = None
    parse: Annotated[bool, truth] = False
    drop_unsupported: Annotated[bool, truth] = False
    probabilities: Annotated[str, partial(one_of, known=checks.PROBABILITIES)] = checks.MAP

    @classmethod
    def from_arguments(cls, input: Any, output: Any, **options: Any) -> Self:
        """Check the arguments of jobs.score_parquet, and bring them into one form.

        input: files, folders and globs below the data roots. A folder named key=value adds a column `key`.
        output: a new or empty folder, or the folder of this run.
        prompt_column: the column of texts that are completed as they are.
        messages_column: the column of chats: lists of structs with role and content, or their JSON.
        template: a text with {column} fields, or a chat of such texts.
        prompts: several prompts for each row, as mappings of name, template and sampling.
        sampling: keyword arguments of engine.SamplingParams.
        sampling_columns: the columns that hold each row's own values, by the names of the values.
        defaults: the text that stands for null, by column.
        image_column: one or several columns of pictures.
        For check, max_attempts, continue_on_length and repair_template see RepairOptions. For all other arguments see
        `tokenmill submit`. Raises InvalidJob or UnsupportedScheme.
        """
        cls._check_names(options)
        options = {name: value for name, value in options.items() if value is not None}
        # Options such as `agree` ask for a way: several requests that lead to one answer.
        options, way_options = split_way(options)
        source = _source(options)
        if options.get("input_format") == OPENAI_BATCH:
            checks.check_batch(options)
            source = OPENAI_BATCH
            # The parser of single_file refuses the value OPENAI_BATCH, because producers may not give it. So that value
            # is set after the parser has run.
            options["single_file"] = True

        arguments = {"input": input, "output": output, **options}
        if options.get("task") == checks.RERANK:
            arguments = {"query_column": "query", "document_column": "document", **arguments}
            if source is not None:
                raise InvalidJob(
                    f"task 'rerank' asks query_column and document_column: leave {source} out"
                )

        values = {}
        for name, value in arguments.items():
            parse = _PARSERS.get(name)
            values[name] = value if parse is None else parse(name, value)
        values["way_options"] = way_options
        completes_column = source in (None, "prompt_column") and "query_column" not in arguments
        if not completes_column:
            values["prompt_column"] = None
        if source == OPENAI_BATCH:
            values["single_file"] = OPENAI_BATCH
            values["keep"] = ["custom_id"]

        has_chat_template = isinstance(values.get("template"), list)
        is_chat = has_chat_template or source in ("messages_column", "prompts")
        rows_per_shard = values.get("rows_per_shard", cls.rows_per_shard)
        values["sampling"] = prompt_steps.run_sampling(
            values.get("sampling", {}), rows_per_shard, is_chat=is_chat
        )
        spec = cls(**values)
        _check_combinations(spec, options)
        return spec

    @classmethod
    def _check_names(cls, options: Mapping[str, Any]) -> None:
        """Raise InvalidValue for a name that is no option of jobs.score_parquet."""
        not_options = {"input", "output", "way_options"}
        known = [field.name for field in fields(cls) if field.name not in not_options]
        known += WAY_OPTIONS
        unknown = options.keys() - set(known)
        if unknown:
            raise InvalidValue(
                "{} is no argument of jobs.score_parquet; its options are " + ", ".join(known),
                brief(min(unknown)),
            )

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of jobs.score_parquet as JSON, without those at their defaults."""
        arguments = asdict(self)
        for option in fields(self):
            default = option.default
            if option.default_factory is not MISSING:
                default = option.default_factory()
            if arguments[option.name] == default:
                del arguments[option.name]
        way_options = arguments.pop("way_options", {})
        return {**arguments, **way_options}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the spec that `to_json` has written."""
        values = {}
        way_options = {}
        for name, value in content.items():
            if name in WAY_OPTIONS:
                way_options[name] = value
            else:
                values[name] = value
        return cls(**values, way_options=way_options)

    @property
    def parts_folder(self) -> str:
        """Return the folder of the parts: the output, or a folder in it if the output is a single file."""
        if self.single_file is None:
            return self.output
        return os.path.join(self.output, PARTS)

    @property
    def dialect(self) -> dict[str, str]:
        """Return the arguments that say how the input's text is written (see DIALECT), without those that are None."""
        values = {}
        for name in DIALECT:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        return values

    @property
    def is_chat(self) -> bool:
        """Whether each row's prompt is a chat."""
        return self.messages_column is not None or isinstance(self.template, list)

    @property
    def n(self) -> int:
        """Return how many completions each row gets. If this is more than one, the output has lists of them."""
        n = self.sampling.get("n", 1)
        return n if type(n) is int and n > 0 else 1  # a worker refuses other values

    @cached_property
    def run(self) -> str:
        """Return the run's id: 16 hexadecimal digits that depend on the arguments alone."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    @cached_property
    def chat(self) -> ChatArguments:
        """Return the run's sampling values, split into values for the engine and options of chats."""
        return split_chat_options(self.sampling)

    @property
    def writes_lines(self) -> bool:
        """Whether the output is one file of CSV or JSON lines.

        Such a file has no types of columns. So a row's own JSON can be written into it as it was in the input.
        """
        return self.single_file in (CSV, JSONL)

    @property
    def has_tools(self) -> bool:
        """Whether rows' chats may have tools, from the run or from a column."""
        return "tools" in self.chat.options or self.has_row_tools

    @property
    def has_row_tools(self) -> bool:
        """Whether rows' chats may have tools from a column. With `tool_choice` "none" they have no tools at all."""
        offers_tools = self.sampling.get("tool_choice") != "none"
        return offers_tools and "tools" in self.sampling_columns

    @cached_property
    def steps(self) -> tuple[prompt_steps.PromptStep, ...]:
        """Return the prompts of each row if `prompts` is given; else (). Raises InvalidJob."""
        if self.prompts is None:
            return ()
        return prompt_steps.make_steps(
            self.prompts,
            self.sampling,
            from_columns=self.sampling_columns.keys(),
            rows_per_shard=self.rows_per_shard,
            has_labels=self.labels is not None,
        )

    @cached_property
    def repairs(self) -> RepairOptions:
        """Return how answers are checked, and when rows are asked again."""
        return RepairOptions(
            self.check, self.max_attempts, self.continue_on_length, self.repair_template
        )

    @cached_property
    def parsed_types(self) -> Mapping[str, ValueType]:
        """Return the types of the values that answers are parsed into, by the prompt's name. Raises InvalidJob.

        The name is "" if rows have one prompt. If a prompt is missing from the mapping, its answers stay texts.
        """
        if not self.parse:
            return {}
        sampling_of = {step.name: step.sampling for step in self.steps if not step.is_scored}
        if not sampling_of:
            sampling_of = {"": self.sampling}
        types = {}
        for name, sampling in sampling_of.items():
            schema = self._schema_of(sampling)
            if schema is not None:
                types[name] = type_of_schema(_from_json(schema))
        if not types:
            raise InvalidJob(
                "parse gives answers the types of their schema, but there is no schema: give response_format, "
                "structured_outputs with json, or check_schema too"
            )
        return types

    def _schema_of(self, sampling: Mapping[str, Any]) -> Any:
        """Return the JSON schema of a prompt's answers, or else of the run's check; None if there is no schema."""
        structured = sampling.get("structured_outputs")
        if isinstance(structured, dict) and structured.get("json") is not None:
            return structured["json"]
        if self.check is None:
            return None
        return self.check.get("json")

    @cached_property
    def way(self) -> Way | None:
        """Return the method by which several requests lead to a row's answer; None if one request is enough."""
        return way_of(self.way_options)

    def admit(self, checks: Checks) -> None:
        """Raise InvalidJob if the run needs a function that this worker does not allow."""
        checks.admit(self.repairs)
        if self.way is not None:
            self.way.admit(checks)

    def prepare(self, checks: Checks) -> None:
        """Raise InvalidJob if the run's check, or its way to an answer, can never work.

        This may import a function, which may take long.
        """
        checks.prepare(self.repairs)
        if self.way is not None:
            self.way.prepare(checks)

    def functions_version(self, checks: Checks) -> str:
        """Return the version of the functions that look at answers. Raises InvalidJob.

        The version is a text that changes when the functions' files change.
        """
        version = checks.version(self.repairs)
        if self.way is not None:
            version += self.way.version(checks)
        return version

    def check_values(self, check_sampling: Callable[[Mapping[str, Any]], None]) -> None:
        """Check the sampling values of all requests, and the names of the columns that hold such values.

        check_sampling: raises InvalidJob for values that no request could use, and for unknown names of values.
        """
        sampling_of_requests = [step.sampling for step in self.steps] or [self.chat.sampling]
        for sampling in sampling_of_requests:
            check_sampling(sampling)
        for name in self.sampling_columns:
            # Only an unknown name is an error here. InvalidValue means that a known name refuses the value None.
            with suppress(InvalidValue):
                check_sampling({name: None})

    def differences(self, other: Self) -> list[str]:
        """Return the names of the arguments that differ between two specs."""
        arguments = self.to_json()
        other_arguments = other.to_json()
        names = {**arguments, **other_arguments}
        return [name for name in names if arguments.get(name) != other_arguments.get(name)]


#: The function in the annotation of each field that has one.
_PARSERS: Mapping[str, Callable[[str, Any], Any]] = {
    name: get_args(kind)[1]
    for name, kind in get_type_hints(RunSpec, include_extras=True).items()
    if get_origin(kind) is Annotated
}


def _from_json(schema: Any) -> Any:
    """Return a schema, which may be given as its JSON text. Raises InvalidJob."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"the schema of the answers is not JSON: {error}") from None


def _source(options: Mapping[str, Any]) -> str | None:
    """Return the name of the option that says what each row asks. Raises InvalidJob for more than one such option.

    Returns None if there is no such option. `prompt_column` with the default column does not count, because it may
    stand beside another option.
    """
    possible = ["messages_column", "template", "prompts"]
    if options.get("prompt_column") != DEFAULT_PROMPT_COLUMN:
        possible.insert(0, "prompt_column")
    sources = [name for name in possible if name in options]
    if len(sources) > 1:
        raise InvalidJob(f"{' and '.join(sources)} each say what to ask: give one of them")
    return sources[0] if sources else None


def _check_combinations(spec: RunSpec, options: Mapping[str, Any]) -> None:
    """Raise InvalidJob for arguments that cannot be combined, and for a template that is not valid."""
    if spec.keep is not None and spec.drop is not None:
        raise InvalidJob("keep and drop each say which columns the output has: give one of them")
    if spec.order is not None and spec.only_new:
        raise InvalidJob(
            "order sorts the rows of a whole run, and only_new leaves some out: give one of them"
        )
    _check_task_options(spec)
    _check_images(spec)
    _check_escalation(spec)
    _check_template(spec)
    # `spec.steps` raises InvalidJob if the prompts are not valid.
    sampling_of_requests = [step.sampling for step in spec.steps] or [spec.sampling]
    has_logprobs = any(sampling.keys() & set(LOGPROBS) for sampling in sampling_of_requests)
    _check_usable(
        "logprob_type" in options,
        has_logprobs,
        "logprob_type is for log probabilities, and none are asked for: name logprobs too",
    )
    checks.check_scoring_options(vars(spec), is_chat=spec.is_chat)
    check_repairs(
        spec.repairs,
        spec.sampling,
        has_tools=spec.has_tools,
        has_steps=spec.prompts is not None,
        has_labels=spec.labels is not None,
    )
    # With labels and several prompts, only the last prompt is scored. The answers to the other prompts are generated.
    has_generated_prompt = not spec.labels or spec.prompts is not None
    _check_usable(
        spec.parse,
        spec.task == checks.GENERATE and has_generated_prompt,
        "parse is for generated answers: leave it out",
    )
    # `spec.parsed_types` raises InvalidJob for a schema that fits into no column.
    _ = spec.parsed_types
    if spec.way is not None:
        _check_way(spec, spec.way, is_batch=spec.single_file == OPENAI_BATCH)


def _check_usable(option: object, is_usable: object, message: str) -> None:
    """Raise InvalidJob if an option is given where it cannot be used."""
    if option and not is_usable:
        raise InvalidJob(message)


def _check_task_options(spec: RunSpec) -> None:
    """Raise InvalidJob for an option that belongs to another task or another kind of input."""
    _check_usable(
        spec.model_alias,
        spec.single_file == OPENAI_BATCH,
        "model_alias is for batch files: give input_format openai-batch, or leave it out",
    )
    _check_usable(
        spec.inline_pictures,
        spec.single_file == OPENAI_BATCH,
        "inline_pictures is for batch files: give input_format openai-batch, or leave it out",
    )
    _check_usable(
        spec.batch_endpoint,
        spec.single_file == OPENAI_BATCH,
        "batch_endpoint is for batch files: give input_format openai-batch, or leave it out",
    )
    _check_usable(
        spec.drop_unsupported,
        spec.single_file == OPENAI_BATCH or spec.messages_column,
        "drop_unsupported is for batch files and for columns of chats: leave it out",
    )
    _check_usable(
        spec.check_columns,
        spec.repairs.function,
        "check_columns are for a function that checks, and there is none",
    )
    _check_usable(
        spec.calibrate, spec.labels, "calibrate is for labels, and there are none: name labels too"
    )
    has_struct = spec.probabilities == checks.STRUCT
    _check_usable(
        has_struct,
        spec.labels,
        "a struct of probabilities has a field for each of the run's labels, and the run has no labels: name "
        "labels too, or leave out the option `probabilities`",
    )
    if has_struct:
        check_limit(
            len(spec.labels or ()),
            checks.MAX_STRUCT_LABELS,
            "a struct of probabilities has {} labels",
            "leave out the option `probabilities`, and they are written as a map",
        )
    _check_usable(
        spec.dimensions,
        spec.task == checks.EMBED,
        "dimensions is for embeddings: give task 'embed' too",
    )
    _check_usable(
        spec.prompt_name,
        spec.task == checks.EMBED,
        "prompt_name is for embeddings: give task 'embed' too",
    )
    _check_usable(
        spec.query_column or spec.document_column,
        spec.task == checks.RERANK,
        "query_column and document_column are for reranking: give task 'rerank' too",
    )
    _check_usable(
        "tools" in spec.sampling_columns,
        spec.is_chat and spec.prompts is None,
        "tools from a column are for chats, with one prompt for each row: give messages_column or a chat's template",
    )


def _check_images(spec: RunSpec) -> None:
    """Raise InvalidJob if the run has a column of pictures, and cannot have one."""
    images = spec.image_column
    _check_usable(
        images,
        spec.task == checks.GENERATE,
        f"image_column and task {spec.task!r} do not go together",
    )
    _check_usable(
        images,
        spec.prompts is None,
        "image_column and prompts do not go together: ask one prompt with a template",
    )
    _check_usable(
        images,
        not spec.calibrate,
        "image_column and calibrate do not go together: calibrate asks a prompt without content, and a picture is "
        "content",
    )


def _check_escalation(spec: RunSpec) -> None:
    """Raise InvalidJob for a cascade that lacks an option, or that is not for labels."""
    margin = spec.escalate_below
    second = spec.escalate_to or spec.escalate_model
    _check_usable(
        margin,
        spec.labels and not spec.prompts,
        "escalate_below is for labels of one prompt: name labels, no prompts",
    )
    _check_usable(
        margin,
        ADAPTER not in spec.sampling,
        "escalate_below asks a second model, which lacks the first one's adapter: leave adapter or escalate_below out",
    )
    _check_usable(
        margin,
        second,
        "escalate_below asks a second model, but none is named: give escalate_to or escalate_model too",
    )
    _check_usable(
        second,
        margin,
        "escalate_to and escalate_model name the second model that is asked: give escalate_below too",
    )


def _check_template(spec: RunSpec) -> None:
    """Raise InvalidJob for a template that is not valid, and for a template's options without a template."""
    is_jinja = spec.template_format == "jinja"
    has_template = spec.template is not None
    _check_usable(
        is_jinja,
        spec.prompts is None,
        "template_format is 'jinja', and prompts have {column} templates: leave template_format out",
    )
    _check_usable(
        is_jinja,
        has_template,
        "template_format says how a template is written, but there is no template: give one too",
    )
    _check_usable(
        spec.defaults,
        has_template or spec.prompts is not None,
        "defaults stand for null in a template, but there is no template: give one too",
    )
    if is_jinja:
        template_texts(spec.template)  # raises for a template of another form
    elif has_template:
        parsed = prompt_steps.Template.parse(spec.template)
        if not parsed.columns and not spec.image_column:
            raise InvalidJob(
                "the template names no column, so that every row would ask the same: write {column} where a row's "
                f"value goes; {prompt_steps.BRACES}"
            )
        parsed.check_cost(spec.rows_per_shard)


def _check_way(spec: RunSpec, way: Way, *, is_batch: bool) -> None:
    """Raise InvalidJob for an argument that cannot be combined with `way`.

    way: the method by which several requests lead to one answer.
    """
    name = way.main_option()
    for other, value in (("prompts", spec.prompts), ("labels", spec.labels)):
        if value:
            raise InvalidJob(f"{name} and {other} do not go together: leave one out")
    if spec.task != checks.GENERATE or is_batch:
        raise InvalidJob(f"{name} is for prompts and chats whose answers are generated")
    check_way_fits(way, spec.sampling, spec.repairs)
    way.check(spec.sampling, spec.chat.options.get("tools", []))


def check_num_files(num_files: int) -> None:
    """Raise InvalidJob if an input names too many files."""
    check_limit(num_files, MAX_FILES, "the input names {} files", "make several runs of it")


def check_queue_name(value: Any, name: str = "queue") -> str:
    """Return a queue's name if it is valid. name: the argument's name, for the error. Raises InvalidValue."""
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_NAME_CHARS:
        return value
    raise wrong_value_error(
        name, value, f"a queue's name, printable and at most {MAX_NAME_CHARS} characters"
    )
