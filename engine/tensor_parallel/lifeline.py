"""Ends a rank's process when its driver ends. The module imports nothing heavy, as it runs before torch is imported."""

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def hold(descriptor: int, *, driver_pid: int, thread_id: int) -> None:
    """End this process as soon as the driver has ended, for whatever reason; ignore SIGINT and SIGTERM.

    A signal may reach every process of a group, but the driver alone decides what follows from it.
    descriptor: the socket to the driver; only the driver holds its other end.
    thread_id: the driver's thread that started this process. If it is the driver's main thread, which lives as long as
    the driver, Linux kills this process when that thread ends. This works even if this process is frozen.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_wait_for_the_end, args=(descriptor,), daemon=True).start()
    if thread_id == driver_pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver_pid:
        os._exit(1)  # the driver ended before any of this was in place


def _wait_for_the_end(descriptor: int) -> None:
    """End this process at once when the driver's end of the socket closes, whatever the main thread waits for."""
    poll = select.poll()
    # 0 asks for no event. A poll reports a closed peer all the same.
    poll.register(descriptor, 0)
    poll.poll()
    os._exit(1)
