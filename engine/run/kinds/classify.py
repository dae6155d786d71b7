"""Classify: requests for the classes of a text, or of a pair of texts."""

from engine.checkpoint.heads import Classes
from engine.errors import InvalidPrompt, InvalidSampling, UnsupportedTask
from engine.run.kinds.pooled_kind import PooledKind
from engine.sampling.request_kinds import ClassParams
from engine.schedule.pooled import ClassStates
from engine.text.prompts import Prompt


class Classify(PooledKind[ClassParams]):
    """Classifies texts, by a checkpoint with a head for sequence classification."""

    params = ClassParams
    result_field = "class_scores"

    def check(self, params: ClassParams) -> None:
        """Raise UnsupportedTask if the checkpoint has no classification head."""
        self._known_classes()

    def token_ids(self, prompt: Prompt, params: ClassParams) -> list[int]:
        """Tokenize a text, or a pair of texts. Raises InvalidRequest or a subclass."""
        longest = min(self._prompts.max_model_len, self._tokenizer.max_length)
        if params.pair is None:
            most = self._most_tokens(params.truncate_prompt_tokens, longest)
            return self._first_token_ids(prompt, most)
        if not isinstance(prompt, str):
            raise InvalidSampling("pair is for texts: a prompt of token ids cannot have one")
        token_ids = self._tokenizer.encode_pair(
            prompt, params.pair, longest, self._prompts.vocab_size
        )
        if not token_ids:
            raise InvalidPrompt("both texts are empty; they need at least one token")
        return token_ids

    def states(self, params: ClassParams, num_tokens: int) -> ClassStates:
        """Return an object that collects the scores of a text's classes."""
        return ClassStates(self._known_classes(), num_tokens, of_pair=params.pair is not None)

    def _known_classes(self) -> Classes:
        classes = self._loaded.classes
        if classes is None:
            raise UnsupportedTask(
                "this checkpoint has no sequence-classification head; serve one that has"
            )
        return classes
