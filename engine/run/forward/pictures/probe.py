"""The probe of pictures: a prompt with two pictures must give the logits of transformers' code, whole or in chunks."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidPrompt, UnsupportedModel, quoted
from engine.run.forward.pictures.reader import PictureReader
from engine.run.forward.pictures.tower import Tower
from engine.run.forward.probe import Probe, differ
from engine.schedule.pictures import PromptPictures, StepPictures
from engine.schedule.step_batch import StepBatch

SIZES = ((56, 84), (112, 56))  # height and width


def probe_pictures(
    reader: PictureReader,
    tower: Tower,
    run: Callable[[StepBatch], Tensor],
    *,
    most: int,
    num_places: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Find out whether a picture's tokens attend causally or also to each other; set reader and model accordingly.

    run: computes a step over a pool of num_places tokens that nobody uses yet.  dtype: of the pool.  most: the most
    tokens of a picture.  Raises UnsupportedModel if neither gives the logits of transformers' own code.
    """
    values = np.random.default_rng(0)
    pictures = [values.integers(0, 255, (*size, 3), dtype=np.uint8) for size in SIZES]
    text = reader.text_of(["a ", pictures[0], " b c ", pictures[1], " d"])
    try:
        inputs = reader.joint_inputs(text, pictures)
        prompt_ids = inputs.pop("input_ids")[0]
        token_ids, prompt = reader.read(text, pictures, lambda _: prompt_ids.tolist())
        for picture in prompt.seen:
            tower.look(picture)
        options = {name: tower.to_device(tensor) for name, tensor in inputs.items()}
        expected = tower.model.reference_logits(prompt_ids.to(tower.device), **options)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"pictures cannot be tried: {quoted(error)}") from error
    num_tokens = len(token_ids)
    if num_tokens > num_places:
        raise UnsupportedModel(
            f"two pictures have {num_tokens} tokens, and {num_places} fit: raise max_model_len"
        )
    probe = Probe(num_tokens, block_size, [num_tokens])

    def logits(prompt: PromptPictures, start: int, end: int) -> Tensor:
        step = probe.step([(np.array(token_ids[start:end]), start, 0)])
        rows, parts, blocks = prompt.within(start, end)
        positions = None if prompt.positions is None else prompt.positions[:, start:end]
        return run(
            replace(step, pictures=StepPictures(rows - start, parts, positions, blocks - start))
        )

    limits = most, tower.shortest_window
    ways = (
        (None, False),  # causally
        (limits, False),  # to each other in all layers
        (limits, True),  # to each other in layers with a window
    )
    for block_limits, only_windows in ways:
        reader.block_limits = block_limits
        tower.model.attention.only_windows = only_windows
        try:
            _, prompt = reader.read(text, pictures, lambda _: prompt_ids.tolist())
        except InvalidPrompt as error:
            raise UnsupportedModel(f"pictures cannot be tried: {error}") from error
        middle = prompt.whole_until(int(prompt.rows[len(prompt.rows) // 2 + 1]))
        parts = torch.cat([logits(prompt, 0, middle), logits(prompt, middle, num_tokens)])
        if not differ(expected, logits(prompt, 0, num_tokens), dtype) and not differ(
            expected, parts, dtype
        ):
            return
    raise UnsupportedModel("pictures are seen differently here than in transformers' own code")
