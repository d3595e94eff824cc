"""An abort that waits until it was told why.

JAX ends a process as soon as it cannot reach the first one of the run, by an abort in a thread of its own:
often before the others' collectives have failed in Python, where the loss could be told and acted upon. A
callback of JAX for this cannot be written in Python (it ends in ``std::bad_cast``, JAX 0.10). What is left is
the signal that the abort raises in its thread, which stays there while the program goes on to the exception.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

HELD = 6.0  # seconds that an abort waits for the exception that tells of the loss
SHOWN = 5.0  # seconds for the exception to be shown, or handled, once there is one

_handler: Any = None  # a function that C calls must stay


def hold_aborts(address: str, told: threading.Event, words: Callable[[], str]) -> None:
    """Let aborts wait where nobody answers at ``address`` (host:port) any more; all others go on.

    Args:
        address: where the first process was.
        told: set when the loss was told.
        words: what to say where nobody does in time.
    """
    global _handler
    if os.name != "posix":
        return

    def on_abort(_: int) -> None:
        if not told.is_set():
            if answers(address):
                return
            if not told.wait(HELD):
                print(f"PeerLost: {words()}", file=sys.stderr, flush=True)
                os._exit(1)
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(SHOWN)
        os._exit(1)

    _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    ctypes.CDLL(None).signal(signal.SIGABRT, _handler)


def answers(address: str, seconds: float = 2.0) -> bool:
    """Whether somebody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except (OSError, ValueError):
        return False
