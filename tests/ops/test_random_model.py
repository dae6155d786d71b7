"""Random checkpoints to try: of the dtype asked for, and with a window only where the family has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.demo.random_model import make_model


@pytest.mark.parametrize(
    ("family", "dtype", "window"), [("llama", "bfloat16", None), ("mistral", "float16", 64)]
)
def test_a_checkpoint_says_its_dtype_and_its_window(
    family: str, dtype: str, window: int | None, tmp_path: Path
) -> None:
    config = json.loads((make_model(tmp_path, family, dtype) / "config.json").read_text())
    assert config["dtype"] == dtype
    assert config.get("sliding_window") == window
