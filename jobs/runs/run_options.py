"""The options of a run by name and type, for editors and type checkers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jobs.context.deadlines import Deadline

Path = str | os.PathLike[str]
BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]


class RunOptions(TypedDict, total=False):
    """The keyword arguments of `jobs.submit`. `tokenmill submit` has the same ones. All may be left out."""

    # What is asked of each row

    prompt_column: str
    """The column whose texts are completed as they are; by default "prompt"."""
    messages_column: str
    """The column of chats: lists of structs with role and content, or their JSON."""
    template: str | Sequence[Mapping[str, str]]
    """A prompt text with {column} fields, or a chat of such texts."""
    messages_template: Sequence[Mapping[str, str]]
    """The same as `template`, for a chat."""
    template_format: Literal["fields", "jinja"]
    """How templates are written."""
    prompts: Sequence[Mapping[str, Any]]
    """Several prompts for each row, as mappings of name, template and sampling."""
    image_column: str | Sequence[str]
    """Columns of pictures, as bytes or paths. {NAME} places one in a template."""
    defaults: Mapping[str, str]
    """Texts that stand for null in a template, by column."""
    default: Mapping[str, str]
    """The same as `defaults`, under the name of the option of `tokenmill submit`."""
    labels: Sequence[str]
    """Labels whose probabilities are wanted in place of a text."""
    probabilities: Literal["map", "struct"]
    """The form of the labels' probabilities: a struct, or a map (default)."""
    calibrate: bool
    """Whether each label's probability is corrected by its probability after a prompt that has N/A for all columns."""
    task: Literal["generate", "embed", "classify", "rerank"]
    """The result of each row: an answer, an embedding, classes or a relevance."""
    query_column: str
    """The column of queries for reranking; by default "query"."""
    document_column: str
    """The column of documents for reranking; by default "document"."""
    dimensions: int
    """How many numbers of each embedding are kept, counted from its beginning."""
    prompt_name: str
    """The name of the checkpoint's prompt that stands before each text to embed."""

    # How a row is answered

    model: str
    """The model that the run needs, by name, path or hub id; by default any."""
    adapter: str
    """The LoRA adapter that answers, by its name on the workers; by default none."""
    adapter_column: str
    """The column with each row's own adapter. Null stands for the run's adapter."""
    sampling: Mapping[str, Any]
    """Sampling values by name. A value that is given as an option of its own overrides the value here."""
    sampling_columns: Mapping[str, str]
    """The columns that hold each row's own values, by the names of the values."""
    column: Mapping[str, str]
    """The same as `sampling_columns`."""
    max_tokens: int
    """The most tokens of a completion; by default 256."""
    max_completion_tokens: int
    """The same as `max_tokens`."""
    min_tokens: int
    """The fewest tokens of a completion."""
    temperature: float
    """How random the draw of tokens is; by default 1. 0 takes the likeliest token."""
    top_p: float
    """Only the likeliest tokens that together have this probability are drawn."""
    top_k: int
    """How many of the likeliest tokens may be drawn."""
    min_p: float
    """Only tokens with at least this share of the likeliest token's probability are drawn."""
    seed: int
    """The run's seed. A row's seed follows from this seed and the row's number."""
    n: int
    """How many completions each row gets. From 2 on, the output has lists of completions."""
    stop: str | Sequence[str]
    """Texts that end a completion."""
    stop_token_ids: Sequence[int]
    """Tokens that end a completion."""
    include_stop_str_in_output: bool
    """Whether a completion keeps the text that ended it."""
    ignore_eos: bool
    """Whether generation goes on after the model's end token."""
    presence_penalty: float
    """A number from -2 to 2. It is subtracted from the logit of each token that was generated before."""
    frequency_penalty: float
    """A number from -2 to 2. It is subtracted from a token's logit each time that the token was generated before."""
    repetition_penalty: float
    """The factor by which the logits of tokens in the prompt and completion are lowered."""
    logit_bias: Mapping[str, float]
    """The numbers that are added to logits, by token id."""
    allowed_token_ids: Sequence[int]
    """The only tokens that may be drawn."""
    bad_words: Sequence[str]
    """Texts that no completion may contain."""
    response_format: Mapping[str, Any] | type
    """The JSON that completions must be: a pydantic model's class, or OpenAI's mapping."""
    structured_outputs: Mapping[str, Any]
    """The form that completions must have, such as {"json": schema}. A schema may be a pydantic model's class."""
    allow_whitespace: bool
    """Whether JSON completions may have blanks and line breaks between their parts. By default they have none."""
    logprobs: int
    """Adds a column with the log probability of each token, and of this many likeliest tokens beside it: 0 to 20."""
    prompt_logprobs: int
    """Adds the same column as `logprobs` for the tokens of the prompt."""
    top_logprobs: int
    """The number of likeliest tokens in `logprobs`, under the name that OpenAI's chats use."""
    logprob_type: Literal["float32", "float16"]
    """How log probabilities are written."""
    skip_special_tokens: bool
    """Whether special tokens are left out of a completion's text; by default they are."""
    spaces_between_special_tokens: bool
    """Whether there are spaces between special tokens that are left in; by default there are."""
    split_special_tokens: bool
    """Whether control tokens in a row's values are text; by default they are."""
    truncate_prompt_tokens: int
    """How many tokens of a prompt are read, counted from its end; -1 for as many as fit."""
    thinking_token_budget: int
    """The most tokens of an answer's reasoning."""
    separate_reasoning: bool
    """Whether an answer's reasoning has a column of its own."""
    parallel_tool_calls: bool
    """Whether an answer may call several tools at once; by default it may."""

    # What is made of answers

    check: Mapping[str, Any]
    """What an answer must pass: {"json": schema}, {"regex": pattern} or {"function": "module.name"}."""
    check_schema: Mapping[str, Any] | type
    """A JSON schema that answers must have, or a pydantic model's class."""
    check_regex: str
    """A pattern of Python's re that whole answers must match."""
    check_function: str
    """A function as "module.name". It gets the row and the completion, and returns None or why the answer is wrong."""
    check_columns: Sequence[str]
    """Further columns of the row that the check function gets. It always gets the prompt's columns."""
    max_attempts: int
    """How many times a row is asked at most, if its answers do not pass the check."""
    continue_on_length: bool
    """Whether an answer that was cut at max_tokens is continued. This counts as an attempt."""
    repair_template: str
    """The text that asks for another answer. {reason} in it stands for why the last answer was wrong."""
    agree: float
    """The share of a prompt's samples that must agree, such as 0.7. A prompt is sampled until they do."""
    max_samples: int
    """The most samples of a prompt with `agree`; by default 16."""
    agree_on: str
    """The part of each sample that is compared: "json", a JSON pointer, or a pattern with a group."""
    tool: str | Sequence[str]
    """Functions that answer the calls of tools, as "module:function"."""
    max_turns: int
    """The most answers of a chat with tools; by default 8."""
    escalate_below: float
    """A margin between the two likeliest labels. A larger model is asked about rows whose margin is lower."""
    escalate_to: str
    """The queue whose workers serve the larger model; by default the run's queue."""
    escalate_model: str
    """The name of the larger model, if the queue has several."""

    # What is read and written

    input_format: Literal["parquet", "csv", "tsv", "jsonl", "arrow", "openai-batch"]
    """The format of the input, if the files' names do not show it."""
    encoding: str
    """The encoding of CSV and JSONL, such as "cp1252"; by default UTF-8."""
    delimiter: str
    """The character between fields of CSV; by default a comma."""
    decimal: Literal[".", ","]
    """The decimal mark of numbers in CSV; by default a point."""
    filename_column: str
    """The name of a column that is added and holds each row's file."""
    model_alias: str | Sequence[str]
    """Names in batch files that stand for the served model; "*" for any name."""
    batch_endpoint: BatchEndpoint
    """The only endpoint that lines of batch files may name. Lines with another one get an error."""
    drop_unsupported: bool
    """Whether unsupported arguments of batch files' lines, and extra keys of messages, are left out."""
    inline_pictures: bool
    """Whether lines of batch files that name a picture's file are refused."""
    limit: int
    """How many rows are scored, from the first on."""
    rows_per_shard: int
    """The most rows of a part; by default 1,000."""
    keep: Sequence[str]
    """The only columns of the input that the output has."""
    drop: Sequence[str]
    """Columns of the input that the output leaves out."""
    parse: bool
    """Whether a column is added that holds each JSON answer as values of its schema's types."""
    output_prefix: str
    """A text before the names of the columns that are added."""
    single_file: bool | str
    """Whether all rows are written into one file in the end. May be the format of this file."""
    output_format: Literal["parquet", "csv", "jsonl", "arrow"]
    """The format of the file that `single_file` asks for; by default Parquet."""
    order: Literal["prefix"]
    """With "prefix", rows are sorted, so that a common beginning is computed once. The parts have this order."""
    reuse: Path | Sequence[Path]
    """Outputs of earlier runs whose answers are taken."""
    reuse_from_any_model: bool
    """Whether answers of other models are taken too."""
    only_new: bool
    """Whether rows that `reuse` has answered are left out."""
    reused_column: str
    """The name of a column that says which row of an earlier run an answer is from."""

    # When the run stops, and who gets a notice

    max_errors: int | str
    """How many rows may have an error, or a share like "5%"; by default 90 %."""
    deadline: Deadline
    """When rows are no longer begun: a duration like "2h" or a timedelta, a time with its offset, or Unix seconds."""
    priority: int
    """The run's share of the queue's workers, as a multiple of the share of a run with priority 1: from 1 to 100."""
    webhook: str
    """A URL that gets a POST once the run ends. Workers must allow its host."""
    on_end: str
    """A function that is called once the run ends, as "module.name". Workers must allow it."""
