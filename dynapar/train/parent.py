"""End a rank whose launcher is gone: nothing else would, and a second start would meet it."""

from __future__ import annotations

import os
import sys
import threading
import time

POLL_SECONDS = 1.0


def follow_parent(poll_seconds: float = POLL_SECONDS) -> None:
    """Watch this process's parent from a thread, and end this process when the parent ends.

    Only for a process that a launcher such as torchrun started; elsewhere a parent may end first
    with good reason.

    Args:
        poll_seconds: Between two looks.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_seconds)
        print(f"launcher {parent} is gone: rank ends", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()
