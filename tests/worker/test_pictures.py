"""Pictures become arrays in child processes: what is none costs its request, and nothing else."""

import io
import os
import signal
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine import InvalidRequest
from sandbox import Child, Limits
from tests.picture_files import BLUE, RED, bomb, broken, picture
from worker.engine_thread import pictures
from worker.engine_thread.pictures import decode_pictures

pytestmark = pytest.mark.processes


def parts(*files: bytes) -> list[dict[str, Any]]:
    return [{"type": "image", "image": file} for file in files]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_picture_of_each_format_is_an_array_of_rgb(kind: str) -> None:
    (found,) = decode_pictures(
        parts(picture(RED, (4, 2), kind, **({"lossless": True} if kind == "WEBP" else {})))
    )
    assert (found.shape, found.dtype) == ((2, 4, 3), np.uint8)
    assert np.abs(found.astype(int) - RED).max() <= 2  # a JPEG's is nearly the color


def test_it_is_turned_as_its_camera_says_and_white_where_transparent() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_pictures(parts(picture(RED, (4, 2), "JPEG", exif=exif)))[0].shape == (4, 2, 3)
    (found,) = decode_pictures(parts(picture((*RED, 0))))
    assert (found == 255).all()


@pytest.mark.parametrize(("kind", "order"), [("PNG", "<"), ("TIFF", "<"), ("TIFF", ">")])
def test_greys_of_16_bits_keep_their_shades(kind: str, order: str) -> None:
    file = io.BytesIO()
    Image.fromarray(np.array([[0, 0x4080, 0xFFFF]], f"{order}u2")).save(file, kind)
    assert decode_pictures(parts(file.getvalue()))[0][0, :, 0].tolist() == [0, 0x40, 255]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_white_are_refused(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (4, 2), 1).save(file, "TIFF")
    with pytest.raises(InvalidRequest, match="picture 1 has pixels of 32 bits"):
        decode_pictures(parts(file.getvalue()))


def test_the_first_frame_is_read() -> None:
    file = io.BytesIO()
    first, second = Image.new("RGB", (4, 2), RED), Image.new("RGB", (4, 2), BLUE)
    first.save(file, "GIF", save_all=True, append_images=[second])
    assert (decode_pictures(parts(file.getvalue()))[0] == RED).all()


def test_texts_stay_between_pictures_and_a_chat_keeps_its_form() -> None:
    text = {"type": "text", "text": "and"}
    first, between, second = decode_pictures([*parts(picture(RED)), text, *parts(picture(BLUE))])
    assert (first[0, 0].tolist(), between, second[0, 0].tolist()) == (
        [255, 0, 0],
        "and",
        [0, 0, 255],
    )
    (message,) = decode_pictures([{"role": "user", "content": [*parts(picture(RED)), text]}])
    assert message["content"][0]["image"].shape == (2, 4, 3)
    assert message["content"][1] == text
    assert decode_pictures([1, 2]) == [1, 2]
    assert decode_pictures("text") == "text"


@pytest.mark.parametrize("file", broken())
def test_what_is_no_picture_is_refused_by_its_place(file: bytes) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^picture 2 (is no picture of|cannot be decoded|has 50000 x 50000)"
    ):
        decode_pictures(parts(picture(), file))


def test_pixels_of_a_prompt_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 10)
    with pytest.raises(
        InvalidRequest, match="picture 2 has 4 x 2 pixels, more than the 2 that its prompt has left"
    ):
        decode_pictures(parts(picture(), picture()))


def test_a_picture_that_takes_too_much_memory_or_ends_its_child_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jobs.prompts.pictures.LIMITS", Limits(20.0, 16 << 20))
    with pytest.raises(InvalidRequest, match="decoding picture 1 took more than 16 MiB of memory"):
        decode_pictures(parts(bomb(6000, 6000)))
    killed, ask = list[int](), Child.ask

    def asked(child: Child, *args: Any) -> Any:
        killed.append(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        return ask(child, *args)

    monkeypatch.setattr(Child, "ask", asked)
    with pytest.raises(InvalidRequest, match="decoding picture 1 ended its process with -9"):
        decode_pictures(parts(picture()))
    assert len(set(killed)) == 2  # tried once more
    monkeypatch.undo()
    assert decode_pictures(parts(picture()))[0].shape == (2, 4, 3)
