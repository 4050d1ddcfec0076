"""The process in which a peer runs: `python -m dynapar.simulate.peers.worker NAME LIMIT`.

Reads requests from its input and writes replies, both pickled, the first of which says whether the
peer is there. LIMIT is the CPU time of one plan, in seconds: at its end the kernel ends the
process, whatever the peer is doing. So does any error of the peer's, whose traceback then is the
last that the process says.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from importlib import import_module

from dynapar.simulate.peers.request import PeerError, PeerMissingError, Planner, Reply, Request


def answer(planner: Planner, request: Request, limit: float) -> Reply:
    """Ask the peer; the process ends where that takes longer than `limit` CPU seconds."""
    signal.setitimer(signal.ITIMER_PROF, limit)
    began = time.process_time()
    try:
        made, reason = planner(request), ""
    except PeerError as error:
        made, reason = None, str(error)
    seconds = time.process_time() - began
    signal.setitimer(signal.ITIMER_PROF, 0)
    return Reply(made, reason, seconds)


def main(name: str, limit: float) -> None:
    """Serve until the input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a peer prints is no reply
    module = import_module(f"dynapar.simulate.peers.{name}")
    try:
        planner: Planner = module.load()
    except PeerMissingError as error:
        pickle.dump(str(error), replies)
        return
    pickle.dump("", replies)
    replies.flush()
    while True:
        try:
            request: Request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(planner, request, limit), replies)
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
