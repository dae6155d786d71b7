"""TokenmillLM: the engine behind the interface of lm-evaluation-harness.

Like the harness' `hf` class, it makes tokens of texts, truncates them from the left and cuts them before stop strings.
So scores are the same.
"""

import logging
from collections.abc import Iterable
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
#: The two texts of the harness, if any; then the tokens of context and continuation.
Scored = tuple[tuple[str, str] | None, Tokens, Tokens]


@register_model("tokenmill")
class TokenmillLM(TemplateLM):
    """A model for `lm_eval --model tokenmill`.

    pretrained, or model: a folder in Hugging Face layout, or a hub id. Other arguments are EngineConfig's.
    max_length: the hf class' name for max_model_len.
    max_gen_toks: the most new tokens, if a task does not say.
    add_bos_token: whether each text begins with the tokenizer's first token; None leaves that to the tokenizer.
    prefix_token_id: stands before a text without context; None takes the tokenizer's first token, or else its last.
    think_end_token: a text or a token id. An answer begins behind its last occurrence.
    enable_thinking, chat_template_args: variables of the chat template.

    batch_size and max_batch_size, which the harness always passes, change nothing: max_num_seqs and
    max_num_batched_tokens decide how much runs at once. Raises ConfigError for an unknown argument or a missing
    prefix_token_id, and what Engine raises.
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
        self._add_bos_token, self._custom_prefix = add_bos_token, prefix_token_id
        self._prefix_text = self.tokenizer.decode(self.prefix_token_id)
        is_id = isinstance(think_end_token, str) and think_end_token.isdigit()
        self._think_end = (
            int(think_end_token) if think_end_token is not None and is_id else think_end_token
        )
        self._enable_thinking = enable_thinking
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking

    def close(self) -> None:
        """Free the model. Nothing can be asked afterwards."""
        self.engine.close()

    @property
    def max_length(self) -> int:
        """Return the most tokens that the model reads, prompt and completion together."""
        return self.engine.max_model_len

    @property
    def eot_token_id(self) -> int | None:
        """Return the token that ends a text; None if the tokenizer has none."""
        token_id: int | None = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token that stands before a text without context. Raises ConfigError if there is none."""
        known = (self._custom_prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        for token_id in known:
            if token_id is not None:
                return int(token_id)
        raise ConfigError(
            "this tokenizer has no token to stand for an empty context; give prefix_token_id"
        )

    @property
    def tokenizer_name(self) -> str:
        """Return the model's name as part of file names."""
        return self._model_name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation. If a template refuses it, the system's messages are left out.

        add_generation_prompt: False if the last message is the beginning of the model's answer.
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
        """Return the token ids of a text. It gets no first token if it begins with that token's text."""
        if add_special_tokens is None:
            return self._encode(string, self._prefix_text)
        return self._with_special(string, add_special_tokens)

    def _encode(self, string: str, prefix: str | None) -> Tokens:
        """Return the token ids of a text. A text that begins with `prefix` has its first token already."""
        if prefix is not None and string.startswith(prefix):
            return self._with_special(string, add_special_tokens=False)
        return self._with_special(string, add_special_tokens=self._add_bos_token)

    def _with_special(self, string: str, add_special_tokens: bool | None) -> Tokens:
        """Return the token ids of a text.

        add_special_tokens: None leaves them to the tokenizer; True adds a first token if the tokenizer adds none.
        """
        is_added = add_special_tokens is not False
        token_ids: Tokens = self.tokenizer.encode(
            string, add_special_tokens=is_added, verbose=False
        )
        bos = self.tokenizer.bos_token_id
        if self._add_bos_token and is_added and bos is not None and token_ids[:1] != [bos]:
            token_ids = [bos, *token_ids]
        return token_ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return how likely each continuation is behind its context, and whether greedy generation gives it."""
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
        texts_and_tokens = list(requests)
        pairs = [self._window(*request) for request in texts_and_tokens]
        scores = self.engine.loglikelihood(pairs, use_tqdm=not disable_tqdm)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _context, _continuation), answer in zip(texts_and_tokens, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _window(
        self, texts: tuple[str, str] | None, context: Tokens, continuation: Tokens
    ) -> tuple[Tokens, Tokens]:
        """Return the end of a context that fits into the model, and the continuation. The last token takes no room."""
        if not 0 < len(continuation) <= self.max_length:
            shown = "" if texts is None else f" {texts[1][:64]!r}"
            raise InvalidRequest(
                f"the continuation{shown} has {len(continuation)} tokens of its own behind its context; "
                f"from 1 to {self.max_length} can be scored"
            )
        room = self.max_length + 1 - len(continuation)
        return (context or [self.prefix_token_id])[-room:], continuation

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return how likely each whole text is.

        A text is cut into windows of max_length tokens. Each window predicts as many new tokens as it can.
        """
        windows: list[Scored] = []
        ends = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            ends.append(len(windows))
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        totals = []
        for request, start, end in zip(requests, [0, *ends], ends, strict=False):
            totals.append(sum(logprob for logprob, _ in scores[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model says behind each context, up to one of the texts in `until`.

        Raises EngineError if a request fails, or InvalidSampling for a value that is not served.
        """
        prepared = [self._prepare(*request.args) for request in requests]
        completions = self.engine.generate(
            (prompt for prompt, _, _ in prepared),
            (params for _, params, _ in prepared),
            use_tqdm=not disable_tqdm,
        )
        answers = []
        for request, (_, _, until), completion in zip(requests, prepared, completions, strict=True):
            if completion.finish_reason == "error":
                raise EngineError(
                    f"the request {request.args[0][-64:]!r} failed: {completion.error}"
                )
            answers.append(self._answer(completion.token_ids, until))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _prepare(
        self, context: str, gen_kwargs: dict[str, Any]
    ) -> tuple[Tokens, SamplingParams, list[str]]:
        """Return a request's prompt, its sampling values, and the texts that end its answer."""
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
        return prompt[-room:], params, until

    def _answer(self, token_ids: Tokens, until: list[str]) -> str:
        """Return the text of an answer, without its reasoning and without the text that ended it."""
        end = self._think_end
        if isinstance(end, int):
            if end in token_ids:
                token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True).lstrip()
        else:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        answer: str = postprocess_generated_text(text, until, end if isinstance(end, str) else None)
        return answer
