"""The probe of pictures: a prompt with two of them, whole and in chunks, must come out as by transformers' own code."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.errors import UnsupportedModel
from engine.pictures.reader import PictureReader
from engine.pictures.tower import Tower
from engine.run.forward.probe import Probe, differ
from engine.schedule.pictures import StepPictures
from engine.schedule.step_batch import StepBatch

MAX_ERROR_CHARS = 300
SIZES = ((56, 84), (112, 56))  # height and width


def probe_pictures(
    reader: PictureReader,
    tower: Tower,
    run: Callable[[StepBatch], Tensor],
    reference: Callable[..., Tensor],
    *,
    num_places: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Raise UnsupportedModel if pictures change logits otherwise than by transformers' own code.

    run: computes a step over a pool of num_places tokens that nobody uses yet.  reference: token ids, inputs -> logits
    of all rows.  dtype: of the pool's numbers.
    """
    values = np.random.default_rng(0)
    pictures = [values.integers(0, 255, (*size, 3), dtype=np.uint8) for size in SIZES]
    text = reader.text_of(["a ", pictures[0], " b c ", pictures[1], " d"])
    try:
        inputs = reader.joint_inputs(text, pictures)
        found = inputs.pop("input_ids")[0]
        token_ids, prompt = reader.read(text, pictures, lambda _: found.tolist())
        for picture in prompt.seen:
            tower.look(picture)
        expected = reference(found.to(tower.device), **{name: tower.to_device(each) for name, each in inputs.items()})
    except UnsupportedModel:
        raise
    except Exception as error:
        problem = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        raise UnsupportedModel(f"pictures cannot be tried: {type(error).__name__}: {problem}") from error
    num_tokens, first = len(token_ids), prompt.whole_until(int(prompt.rows[len(prompt.rows) // 2 + 1]))
    if num_tokens > num_places:
        raise UnsupportedModel(f"two pictures have {num_tokens} tokens, and {num_places} fit: raise max_model_len")
    probe = Probe(num_tokens, block_size, [num_tokens])

    def logits(start: int, end: int) -> Tensor:
        step = probe.step([(np.array(token_ids[start:end]), start, 0)])
        rows, parts = prompt.within(start, end)
        positions = None if prompt.positions is None else prompt.positions[:, start:end]
        within = (prompt.blocks[:, 0] >= start) & (prompt.blocks[:, 1] <= end)
        return run(replace(step, pictures=StepPictures(rows - start, parts, positions, prompt.blocks[within] - start)))

    whole = logits(0, num_tokens)
    parts = torch.cat([logits(0, first), logits(first, num_tokens)])
    for found, words in ((whole, "otherwise"), (parts, "otherwise, in chunks,")):
        if differ(expected, found, dtype):
            raise UnsupportedModel(f"pictures are seen {words} than by transformers' own code")
