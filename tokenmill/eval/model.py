"""TokenmillLM: the engine behind the interface of lm-evaluation-harness.

Texts are tokenized, truncated from the left and cut before stop strings as in the harness's `hf` class. So the scores
are the same.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from engine import ConfigError, Engine, EngineError, InvalidRequest, SamplingParams
from engine.checkpoint.folder import resolve_model
from engine.text.chat_templates import read_template
from engine.text.tokenizer_files import load_tokenizer
from tokenmill.eval.arguments import engine_config, sampling_params

logger = logging.getLogger(__name__)

Tokens = list[int]
#: A request to score a continuation: the texts of context and continuation, if there are texts, and the tokens of both.
Scored = tuple[tuple[str, str] | None, Tokens, Tokens]


@dataclass(frozen=True)
class _Generation:
    """A request to generate. prompt: its tokens, cut to fit. until: the texts that end the answer."""

    prompt: Tokens
    params: SamplingParams
    until: list[str]


@register_model("tokenmill")
class TokenmillLM(TemplateLM):
    """A model for `lm_eval --model tokenmill`.

    pretrained or model: a folder in Hugging Face layout, or a hub id. arguments: those of EngineConfig.
    max_length: what the hf class calls max_model_len.
    max_gen_toks: the most new tokens for tasks that do not say how many.
    add_bos_token: whether each text begins with the BOS token; None leaves that to the tokenizer.
    prefix_token_id: the token before a text without context; None stands for the BOS token, or else the EOS token.
    think_end_token: a text or a token id. An answer begins after its last occurrence.
    enable_thinking, chat_template_args: variables of the chat template.

    The harness always passes batch_size and max_batch_size. They change nothing: max_num_seqs and
    max_num_batched_tokens decide how much runs at once. Raises what Engine raises, and ConfigError for an unknown
    argument or a missing prefix_token_id.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        # The harness passes these to every model. The engine forms its batches itself.
        for name in ("batch_size", "max_batch_size"):
            arguments.pop(name, None)
        config = engine_config(pretrained, model, max_length, arguments)
        if enable_thinking and think_end_token is None:
            raise ConfigError(
                "enable_thinking=True needs think_end_token, behind which an answer begins"
            )
        folder = resolve_model(config.model)
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.chat_template = read_template(folder, config.chat_template)
        self.engine = Engine(config)
        self.max_gen_toks = max_gen_toks
        self._model_name = config.model
        self._add_bos_token = add_bos_token
        self._custom_prefix = prefix_token_id
        self._prefix_text = self.tokenizer.decode(self.prefix_token_id)
        self._think_end = think_end_token
        if isinstance(think_end_token, str) and think_end_token.isdigit():
            self._think_end = int(think_end_token)
        self._enable_thinking = enable_thinking
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking

    def close(self) -> None:
        """Free the model. No other method may be called afterwards."""
        self.engine.close()

    @property
    def max_length(self) -> int:
        """Return the most tokens that the model reads, prompt and completion together."""
        return self.engine.max_model_len

    @property
    def eot_token_id(self) -> int | None:
        """Return the id of the EOS token; None if the tokenizer has none."""
        token_id: int | None = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token before a text without context. Raises ConfigError if there is none."""
        candidates = (self._custom_prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        for token_id in candidates:
            if token_id is not None:
                return int(token_id)
        raise ConfigError(
            "this tokenizer has no token to stand for an empty context; give prefix_token_id"
        )

    @property
    def tokenizer_name(self) -> str:
        """Return the model's name in a form that is fit for file names."""
        return self._model_name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation. If the template refuses it, the text is without the system messages.

        add_generation_prompt: whether the model's answer follows the last message; False if that message begins it.
        """
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **self._template_args,
        }
        try:
            text: str = self.tokenizer.apply_chat_template(chat_history, **options)
        except TemplateError:
            logger.warning(
                "the chat template refuses these messages; trying again without the system's"
            )
            other_messages = [message for message in chat_history if message["role"] != "system"]
            text = self.tokenizer.apply_chat_template(other_messages, **options)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Return the token ids of a text.

        add_special_tokens: whether special tokens are added; None adds them unless the text begins with one.
        """
        if add_special_tokens is None:
            return self._encode(string, self._prefix_text)
        return self._encode_with(string, add_special_tokens)

    def _encode(self, string: str, prefix: str | None) -> Tokens:
        """Return the token ids of a text. Special tokens are not added to a text that begins with `prefix`."""
        if prefix is not None and string.startswith(prefix):
            return self._encode_with(string, add_special_tokens=False)
        return self._encode_with(string, add_special_tokens=self._add_bos_token)

    def _encode_with(self, string: str, add_special_tokens: bool | None) -> Tokens:
        """Return the token ids of a text. The tokenizer adds its special tokens unless `add_special_tokens` is False.

        With `add_bos_token`, the BOS token is added if the tokenizer does not add it.
        """
        adds_special = add_special_tokens is not False
        token_ids: Tokens = self.tokenizer.encode(
            string, add_special_tokens=adds_special, verbose=False
        )
        bos = self.tokenizer.bos_token_id
        needs_bos = self._add_bos_token and adds_special and bos is not None
        if needs_bos and token_ids[:1] != [bos]:
            token_ids = [bos, *token_ids]
        return token_ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood after its context, and whether greedy decoding generates it."""
        if self._enable_thinking:
            raise ValueError(
                "enable_thinking=True is for tasks that generate; leave it out for this one"
            )
        likelihoods: list[tuple[float, bool]] = super().loglikelihood(
            requests, disable_tqdm=disable_tqdm
        )
        return likelihoods

    def _loglikelihood_tokens(
        self, requests: Iterable[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return what `loglikelihood` returns, for requests that are tokenized already."""
        all_texts = []
        pairs = []
        for texts, context, continuation in requests:
            all_texts.append(texts)
            pairs.append((self._cut_context(texts, context, continuation), continuation))
        scores = self.engine.loglikelihood(pairs, use_tqdm=not disable_tqdm)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for texts, answer in zip(all_texts, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _cut_context(
        self, texts: tuple[str, str] | None, context: Tokens, continuation: Tokens
    ) -> Tokens:
        """Return the end of a context that fits into the model before its continuation.

        An empty context becomes the prefix token. Raises InvalidRequest if the continuation is empty or too long.
        """
        if not 0 < len(continuation) <= self.max_length:
            shown = "" if texts is None else f" {texts[1][:64]!r}"
            raise InvalidRequest(
                f"the continuation{shown} has {len(continuation)} tokens of its own behind its context; "
                f"from 1 to {self.max_length} can be scored"
            )
        # The model scores the last token, and does not read it. So one more token fits.
        room = self.max_length + 1 - len(continuation)
        if not context:
            context = [self.prefix_token_id]
        return context[-room:]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text.

        A text is cut into windows of max_length tokens. Each window scores as many new tokens as it can.
        """
        windows: list[Scored] = []
        window_counts = []
        for request in requests:
            (text,) = request.args
            rolling = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            num_before = len(windows)
            for window in rolling:
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
            window_counts.append(len(windows) - num_before)

        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = []
        for request, window_count in zip(requests, window_counts, strict=True):
            total = sum(logprob for logprob, _ in islice(scores, window_count))
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the model's answer to each context, up to one of the texts in `until`.

        Raises EngineError if a request fails, and InvalidSampling for a value that the engine does not support.
        """
        generations = [self._generation(*request.args) for request in requests]
        completions = self.engine.generate(
            (generation.prompt for generation in generations),
            (generation.params for generation in generations),
            use_tqdm=not disable_tqdm,
        )
        answers = []
        for request, generation, completion in zip(requests, generations, completions, strict=True):
            if completion.finish_reason == "error":
                context_end = request.args[0][-64:]
                raise EngineError(f"the request {context_end!r} failed: {completion.error}")
            answer = self._answer(completion.token_ids, generation.until)
            answers.append(answer)
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _generation(self, context: str, gen_kwargs: dict[str, Any]) -> _Generation:
        """Return what the engine needs for a request. Raises InvalidRequest if there is no room for a prompt."""
        values = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        max_tokens = values.pop("max_gen_toks")
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        until = [text for text in handle_stop_sequences(values.pop("until"), eos=eos) if text]
        params = sampling_params(
            values, max_tokens=max_tokens, stop=until, end_token_id=self.eot_token_id
        )
        room = self.max_length - params.max_tokens
        if room < 1:
            raise InvalidRequest(
                f"max_gen_toks={params.max_tokens} leaves no room for a prompt: the model reads "
                f"{self.max_length} tokens (max_model_len)"
            )
        prompt = self._encode(context, self.tokenizer.bos_token) or [self.prefix_token_id]
        if len(prompt) > room:
            logger.warning("a prompt of %d tokens is cut to its last %d", len(prompt), room)
        return _Generation(prompt[-room:], params, until)

    def _answer(self, token_ids: Tokens, until: list[str]) -> str:
        """Return the text of an answer, without its reasoning and without the text that ended it."""
        end_text: str | None = None
        # A token that ends the reasoning is found in the ids. A text that ends it is found in the decoded answer.
        if isinstance(self._think_end, int):
            answer_ids = _after_last(token_ids, self._think_end)
            text = self.tokenizer.decode(answer_ids, skip_special_tokens=True).lstrip()
        else:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            end_text = self._think_end
        answer: str = postprocess_generated_text(text, until, end_text)
        return answer


def _after_last(token_ids: Tokens, token_id: int) -> Tokens:
    """Return the tokens after the last occurrence of a token; all tokens if it does not occur."""
    if token_id not in token_ids:
        return token_ids
    num_after = token_ids[::-1].index(token_id)
    return token_ids[len(token_ids) - num_after :]
