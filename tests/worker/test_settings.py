"""Settings that cannot be used stop the start and name what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.errors import SettingsError
from worker.settings import WorkerSettings


def test_an_env_file_that_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_bytes(b"\x80TOKENMILL_MODEL=m")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"\.env cannot be read .*UTF-8"):
        WorkerSettings.load()
