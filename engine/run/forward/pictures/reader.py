"""PictureReader: turns prompts with pictures into tokens and a tower's inputs, by a checkpoint's own processor."""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.model_config import ModelConfig, read_json
from engine.errors import InvalidPrompt, UnsupportedModel
from engine.models.load import ModelPath, choose_path
from engine.models.transformers_model import class_of
from engine.schedule.pictures import PromptPictures, SeenPicture
from engine.text.chat_templates import WITH_PICTURES
from engine.text.prompts import Picture
from engine.text.tokenizer import Tokenizer, open_tokenizer
from sandbox.exhausted import is_exhausted

logger = logging.getLogger(__name__)

FILES = ("preprocessor_config.json", "processor_config.json")
MAX_KNOWN = 1 << 16  # pictures whose id in block keys is remembered
MAX_ERROR_CHARS = 300
# Texts around a picture, to see what a chat template puts between.
LEFT = "before"
RIGHT = "behind"

Positions = Callable[[list[int], list[int], Mapping[str, Any]], NDArray[np.int64] | None]


class PictureReader:
    """Reads pictures as a folder's processor in transformers does, for any number of threads at once.

    mark: stands for a picture in a prompt's text; the processor turns it into placeholders.
    positions: makes positions from token ids, their kinds (1 for placeholders) and the sizes of all pictures.
    names: of the tower's inputs, and of the sizes. The runner sets positions and names when it has a tower.
    block_limits: None if a picture's tokens attend causally. If they also attend to each other: the most tokens of a
        picture, and the token at which the last picture must have ended, or None.
    """

    positions: Positions
    names: tuple[frozenset[str], frozenset[str]]
    block_limits: tuple[int, int | None] | None = None

    def __init__(self, folder: Path) -> None:
        """Open the folder's processor. Raises whatever transformers raises if the files make none."""
        self.processor = open_processor(folder)
        self.mark: str = getattr(
            self.processor, "image_placeholder_token", self.processor.image_token
        )
        self.placeholder_id = _placeholder_id(folder)
        self._placeholder: str = (
            self.processor.tokenizer.convert_ids_to_tokens(self.placeholder_id) or ""
        )
        self._known: WeakValueDictionary[bytes, SeenPicture] = WeakValueDictionary()
        self._key_ids: dict[bytes, int] = {}
        self._next_id = count(1)
        self._lock = Lock()
        self._frame = self.mark  # what stands for a picture in a prompt of parts: see learn_frame

    def learn_frame(self, tokenizer: Tokenizer) -> None:
        """Learn what the chat template puts around a picture, for pictures in prompts without a template too.

        From then on this tokenizer reads a mark that a user's text holds as plain text.
        """
        tokenizer.add_control_texts({self.mark, self._placeholder} - {""})
        parts = [{"type": "text", "text": LEFT}, {"type": "image"}, {"type": "text", "text": RIGHT}]
        with suppress(InvalidPrompt):  # no template, or none for pictures
            text = tokenizer.chat_text([{"role": "user", "content": parts}], kinds=WITH_PICTURES)
            between = text.partition(LEFT)[2].partition(RIGHT)[0].strip()
            if between.count(self.mark) == 1:
                self._frame = between

    def text_of(self, parts: list[Any]) -> str:
        """Join the parts of a prompt, with a mark for each picture. Raises InvalidPrompt."""
        for part in parts:
            if not isinstance(part, str | np.ndarray):
                raise InvalidPrompt(
                    f"the parts of a prompt must be texts and pictures, got {type(part).__name__}"
                )
        return "".join(part if isinstance(part, str) else self._frame for part in parts)

    def check_ids(self, token_ids: list[int]) -> None:
        """Raise InvalidPrompt if the tokens of a prompt without pictures hold a placeholder."""
        if self.placeholder_id in token_ids:
            raise InvalidPrompt(
                f"the prompt has {self._placeholder!r} in it, which stands for a picture, and none came"
            )

    def read(
        self, text: str, pictures: list[Picture], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], PromptPictures]:
        """Return the token ids of a text that has a mark for each picture, and the pictures. Raises InvalidPrompt."""
        seen = [self._see(picture) for picture in pictures]
        texts = text.split(self.mark)
        if len(texts) != len(seen) + 1:
            raise InvalidPrompt(
                f"{self.mark!r} stands for a picture: {len(texts) - 1} in the text, {len(seen)} came"
            )
        expanded = [texts[0]]
        for picture, behind in zip(seen, texts[1:], strict=True):
            expanded.append(picture.text)
            expanded.append(behind)
        token_ids = encode("".join(expanded))
        rows = np.flatnonzero(np.array(token_ids) == self.placeholder_id)
        if len(rows) != sum(picture.num_rows for picture in seen):
            raise InvalidPrompt(
                f"{self._placeholder!r} is in the text, or the text changes a picture's own tokens"
            )
        key_ids = list(token_ids)
        row_key_ids = [picture.key_id for picture in seen for _ in range(picture.num_rows)]
        for row, key_id in zip(rows.tolist(), row_key_ids, strict=True):
            key_ids[row] = key_id
        sizes = {
            name: torch.cat([picture.sizes[name] for picture in seen])
            for name in (seen[0].sizes if seen else ())
        }
        try:
            kinds = self.processor.create_mm_token_type_ids([token_ids])[0] if sizes else []
            positions = self.positions(token_ids, kinds, sizes)
        except Exception as error:  # some models take pictures with no token between them for one
            raise InvalidPrompt(
                f"the pictures have no positions: put a text between them ({error})"
            ) from error
        blocks = self._blocks(seen, rows)
        return token_ids, PromptPictures(tuple(seen), rows, key_ids, positions, blocks)

    def _blocks(self, seen: list[SeenPicture], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row and the end of each block of rows that see each other, [blocks, 2] int64.

        Raises InvalidPrompt for blocks that cannot be computed exactly.
        """
        if self.block_limits is None:
            return np.zeros((0, 2), np.int64)
        firsts = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
        ends = np.append(firsts[1:], len(rows))
        blocks = np.stack((rows[firsts], rows[ends - 1] + 1), axis=1)
        longest, last_end = self.block_limits
        picture_bounds = np.cumsum([0, *(picture.num_rows for picture in seen)])
        if len(np.setdiff1d(picture_bounds[:-1], firsts)):  # a picture begins within a block
            raise InvalidPrompt(
                "this model sees pictures without a text between them as one: put a text there"
            )
        if (blocks[:, 1] - blocks[:, 0]).max() > longest:
            raise InvalidPrompt(
                f"a picture takes more than the {longest} tokens of a step: raise max_num_batched_tokens"
            )
        if last_end is not None and blocks[-1, 1] > last_end:
            raise InvalidPrompt(
                f"a picture ends at token {blocks[-1, 1]}: this model sees pictures as a whole in windows of "
                f"{last_end} tokens, which is built for pictures that end within the first one"
            )
        return blocks

    def joint_inputs(self, text: str, pictures: list[Picture]) -> dict[str, Any]:
        """Return the inputs that transformers' own model takes for a whole prompt."""
        _, size_names = self.names
        more = {"return_mm_token_type_ids": True} if size_names else {}
        return dict(
            self.processor(text=[text], images=_images(pictures), return_tensors="pt", **more)
        )

    def _see(self, picture: Picture) -> SeenPicture:
        digest = blake2b(picture.tobytes() + repr(picture.shape).encode(), digest_size=16).digest()
        with self._lock:
            known = self._known.get(digest)
        if known is not None:
            return known
        made = self._process(picture, digest)
        with self._lock:
            return self._known.setdefault(digest, made)

    def _process(self, picture: Picture, digest: bytes) -> SeenPicture:
        """Make a tower's inputs. Raises InvalidPrompt for a picture that the processor refuses."""
        try:
            made = self.processor(
                text=[self._frame], images=_images([picture]), return_tensors="pt", add_special_tokens=False,
                return_text_replacement_offsets=True,
            )  # fmt: skip
        except Exception as error:
            if is_exhausted(error):
                raise
            height, width, _ = picture.shape
            words = " ".join(str(error).split())[:MAX_ERROR_CHARS]
            raise InvalidPrompt(
                f"a picture of {width} x {height} pixels cannot be read by this model: {words}"
            ) from error
        if "text_replacement_offsets" not in made:
            raise UnsupportedModel(
                f"{type(self.processor).__name__} does not tell what it makes of a picture"
            )
        text = made["text_replacement_offsets"][0][0]["replacement"]
        with self._lock:
            if len(self._key_ids) >= MAX_KNOWN:
                self._key_ids.clear()
            key_id = self._key_ids.setdefault(digest, -next(self._next_id))
        inputs, sizes = ({key: made[key] for key in names & made.keys()} for names in self.names)
        return SeenPicture(digest, key_id, text, text.count(self._placeholder), sizes, inputs)


def _placeholder_id(folder: Path) -> int:
    """Return the token in whose place a model puts features. Raises AttributeError if its configuration has none."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    token_id: int = (
        config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index
    )
    return token_id


def _images(pictures: list[Picture]) -> list[Any]:
    """Make Pillow images. From an array, a processor would have to guess which axis has the colours."""
    from PIL import Image

    return [Image.fromarray(picture) for picture in pictures]


def open_processor(folder: Path) -> Any:
    """Open a checkpoint's processor for text and images; its parts for sound and films are left out.

    AutoProcessor is of no use: it follows what strangers wrote to other models, and needs torchvision for films.
    """
    import transformers
    from transformers.models.auto import processing_auto

    auto: Any = processing_auto
    opened: Any = transformers.AutoImageProcessor
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    values_by_file = {
        name: read_json(folder / name)
        for name in (*FILES, "tokenizer_config.json")
        if (folder / name).is_file()
    }
    class_names = [
        values["processor_class"]
        for values in values_by_file.values()
        if values.get("processor_class")
    ]
    class_names.append(
        auto.PROCESSOR_MAPPING_NAMES.get(read_json(folder / "config.json")["model_type"])
    )
    processor_class: Any = getattr(transformers, class_names[0])
    values = values_by_file.get(FILES[1], {})
    values.pop("audio_tokenizer", None)  # it names a model that would be loaded from anywhere
    parts: dict[str, Any] = dict.fromkeys(processor_class.get_attributes())
    parts["image_processor"] = opened.from_pretrained(str(folder), backend="pil", **local)
    parts["tokenizer"] = open_tokenizer(folder)
    # a subclass that lets parts be None
    unchecked: Any = type(
        processor_class.__name__,
        (processor_class,),
        {"check_argument_for_proper_class": lambda *_: None},
    )
    return unchecked.from_args_and_dict(list(parts.values()), values)


def find_reader(
    folder: Path, model: ModelConfig, path: ModelPath
) -> tuple[ModelConfig, ModelPath, PictureReader | None]:
    """Return a checkpoint's configuration, its path, and the reader of its pictures, or None if it reads none."""
    if path.is_single_pass or not any((folder / name).is_file() for name in FILES):
        return model, path, None
    try:
        classes = vars(sys.modules[class_of(model.whole or model.architecture).__module__]).values()
        if not any(
            hasattr(model_class, "get_image_features")
            for model_class in classes
            if isinstance(model_class, type)
        ):
            return model, path, None
        reader = PictureReader(folder)
    except Exception as error:  # noqa: BLE001 - whatever transformers makes of what is in the files
        words = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        whole = model.whole or model.architecture
        logger.warning(
            "%s is served for text alone: its processor cannot be made (%s)", whole, words
        )
        return model, path, None
    model = replace(model, reads_pictures=True)
    return model, choose_path(model, "auto"), reader
