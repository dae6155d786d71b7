"""TokenmillLM: the engine behind the interface of lm-evaluation-harness.

Texts become tokens, are truncated from the left and cut before stop strings as its `hf` class does it, so
that scores are the same.
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
Scored = tuple[
    tuple[str, str] | None, Tokens, Tokens
]  # what the harness asked, context, continuation


@register_model("tokenmill")
class TokenmillLM(TemplateLM):
    """A model for `lm_eval --model tokenmill`.

    pretrained, or model: a folder in Hugging Face layout, or a hub id. Other arguments are EngineConfig's.
    max_length: the hf class' name for max_model_len. max_gen_toks: new tokens where a task says nothing.
    add_bos_token: whether each text begins with the token for that; None does as the tokenizer does.
    prefix_token_id: stands before what has no context; None takes the token that begins a text, or else ends
    it. think_end_token, a text or a token id: an answer begins behind its last one. enable_thinking,
    chat_template_args: variables of the chat template. batch_size and max_batch_size, which the harness
    gives unasked, change nothing: as much runs at once as max_num_seqs and max_num_batched_tokens allow.
    Raises ConfigError for an argument that is not known, or without prefix_token_id; and as Engine.
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
        """Free the model; nothing can be asked afterwards."""
        self.engine.close()

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most, prompt and completion together."""
        return self.engine.max_model_len

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text; None where the tokenizer has none."""
        token_id: int | None = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before what has no context. Raises ConfigError where the tokenizer has none."""
        known = (self._custom_prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        for token_id in known:
            if token_id is not None:
                return int(token_id)
        raise ConfigError(
            "this tokenizer has no token to stand for an empty context; give prefix_token_id"
        )

    @property
    def tokenizer_name(self) -> str:
        """The model's name, as a name of files."""
        return self._model_name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; where a template refuses it, without what the system says.

        add_generation_prompt: False where the last message is the beginning of the model's answer.
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
                "the chat template refuses these messages; once more without the system's"
            )
            others = [message for message in chat_history if message["role"] != "system"]
            text = self.tokenizer.apply_chat_template(others, **options)
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Token ids of a text; one that begins with the token for a text's beginning gets no second one."""
        if add_special_tokens is None:
            return self._encode(string, self._prefix_text)
        return self._with_special(string, add_special_tokens)

    def _encode(self, string: str, prefix: str | None) -> Tokens:
        """prefix: a text that begins with this has its special token already."""
        if prefix is not None and string.startswith(prefix):
            return self._with_special(string, add_special_tokens=False)
        return self._with_special(string, add_special_tokens=self._add_bos_token)

    def _with_special(self, string: str, add_special_tokens: bool | None) -> Tokens:
        """None does as the tokenizer does; True adds the token for a text's beginning where that does not."""
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
        """How likely each continuation is behind its context, and whether greedy generation gives it."""
        if self._enable_thinking:
            raise ValueError(
                "enable_thinking=True is for tasks that generate; leave it out for this one"
            )
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: Iterable[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        asked = list(requests)
        pairs = [self._window(*each) for each in asked]
        scores = self.engine.loglikelihood(pairs, use_tqdm=not disable_tqdm)
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _context, _continuation), answer in zip(asked, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _window(
        self, texts: tuple[str, str] | None, context: Tokens, continuation: Tokens
    ) -> tuple[Tokens, Tokens]:
        """Context and continuation, as much of the context as the model reads; the last token it does not."""
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
        """How likely each whole text is, in windows of max_length tokens, of which each predicts as many new
        ones as it can."""
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
        """What the model says behind each context, up to a text of its `until`.

        Raises EngineError if one fails, or InvalidSampling for a value that is not served.
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
        """Prompt and sampling values of a request, and the texts that end its answer."""
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
        """The text of an answer, without its reasoning and from before what ended it."""
        end = self._think_end
        if isinstance(end, int):
            if end in token_ids:
                token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True).lstrip()
        else:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        answer: str = postprocess_generated_text(text, until, end if isinstance(end, str) else None)
        return answer
