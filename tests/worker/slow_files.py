"""Workers whose files hang or whose model takes its time, or that are told to stop while they import."""

import os
import signal
import sys
import threading
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from jobs.parquet.files.storage import Storage
from tests.worker.fake_engine import FakeEngineWorker
from worker.settings import WorkerSettings


class HangingFilesWorker(FakeEngineWorker):
    """FakeEngineWorker with inputs that hang in the kernel as on a dead mount: those beside which a FIFO of
    their name and ".hangs" stands into which nobody writes."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        open_now = Storage.open_input

        def open_hanging(storage: Storage, path: str) -> Any:
            if os.path.exists(f"{path}.hangs"):
                os.close(os.open(f"{path}.hangs", os.O_RDONLY))
            return open_now(storage, path)

        Storage.open_input = open_hanging  # type: ignore[method-assign]
        return super().load_engine(settings)


class SlowLoadingWorker(FakeEngineWorker):
    """FakeEngineWorker that makes the file LOADING and then loads for ever."""

    def load_engine(self, settings: WorkerSettings) -> Any:
        Path(os.environ["LOADING"]).touch()
        threading.Event().wait()
        return super().load_engine(settings)


class SignalledWhileImporting(FakeEngineWorker):
    """FakeEngineWorker that gets SIGTERM while its I/O loop's module is half imported."""

    def _install_signal_handlers(self) -> None:
        super()._install_signal_handlers()
        sys.meta_path.insert(0, _Signaller())


class _Signaller(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "worker.io_thread.held.packing":  # what worker.io_thread.io_loop imports
            os.kill(os.getpid(), signal.SIGTERM)
