"""Settings: a worker's environment and `.env`, which give settings or an error that names the variable."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st

from engine import EngineError
from engine.errors import ConfigError
from tests.fuzz.named import check_says
from worker.errors import SettingsError
from worker.settings import WorkerSettings

_NAMES = [f"TOKENMILL_{name.upper()}" for name in WorkerSettings.model_fields]
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_VALUES = st.one_of(
    st.sampled_from(["", " ", "0", "1", "-1", "2", "1e3", "nan", "inf", "true", "None", "null", "[]"]),
    st.sampled_from(["{}", "'", '"', "/", ":", "::", ",", "..", "~", "cpu", "cuda:99", "auto", "9" * 400]),
    st.integers().map(str),
    st.floats().map(str),
    _TEXT,
    st.binary(max_size=6).map(lambda raw: os.fsdecode(raw.replace(b"\0", b""))),
)
ENVIRONMENTS = st.tuples(
    st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4),
    st.one_of(
        st.none(),
        st.binary(max_size=30),
        st.dictionaries(st.sampled_from(_NAMES), _TEXT, max_size=2).map(
            lambda lines: "\n".join(f"{name}={value}" for name, value in lines.items()).encode()
        ),
    ),
)


def check_settings(folder: Path, case: tuple[dict[str, str], bytes | None]) -> None:
    """Load the settings in a folder with that `.env`, and make the engine's configuration of them."""
    environment, env_file = case
    before = os.getcwd()
    dotenv = folder / ".env"
    dotenv.unlink(missing_ok=True)
    if env_file is not None:
        dotenv.write_bytes(env_file)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, {**inherited, "TOKENMILL_MODEL": "m", **environment}, clear=True):
            settings = WorkerSettings.load()
        config = settings.engine_config()
    except SettingsError as error:
        check_says(error, "TOKENMILL_", ".env")
    except ConfigError as error:
        check_says(error)
    except EngineError as error:
        raise AssertionError(f"not an error of configuration: {error!r}") from error
    else:
        assert config.max_num_seqs > 0
        assert all(os.path.isdir(root) for root in settings.data_roots)
    finally:
        os.chdir(before)
