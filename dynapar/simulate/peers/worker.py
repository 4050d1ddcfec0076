"""The process in which a peer runs: `python -m dynapar.simulate.peers.worker MODULE LIMIT`.

Reads requests from its input and writes replies, both pickled, the first of which says whether the
peer is there. LIMIT is the CPU time of one plan, in seconds: at its end the kernel ends the
process, whatever the peer is doing. So does any error of the peer's, whose traceback then is the
last that the process says.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
from importlib import import_module

import numpy as np

from dynapar.packing.ticks import Coefficients
from dynapar.simulate.peers.request import PeerError, PeerMissingError, Planner, Reply, Request

WARM = Request(
    tokens=np.array([90, 80, 70, 60]),
    reach=np.array([90.0, 80.0, 70.0, 60.0]),
    unit_offsets=np.array([0, 1, 1, 1, 1]),
    unit_tokens=np.array([30]),
    ranks=2,
    node=2,
    capacity=100,
    encoder_capacity=100,
    constants=Coefficients(1.0, 0, 1.0, 0.0, 1, 0.0, 0.0, 0.0, 1.0, 0.0, 1, 0, 0, 2),
    lockstep=False,
    degree=1,
)
"""A step that every peer plans before its first: what it compiles or caches is not counted."""


def answer(planner: Planner, request: Request, limit: float) -> Reply:
    """Ask the peer; the process ends where that takes longer than `limit` CPU seconds."""
    signal.setitimer(signal.ITIMER_PROF, limit)
    # Under the timer, the clock of the process moves by whole jiffies; that of the thread does not.
    began = time.thread_time()
    try:
        made, reason = planner(request), ""
    except PeerError as error:
        made, reason = None, str(error)
    seconds = time.thread_time() - began
    signal.setitimer(signal.ITIMER_PROF, 0)
    return Reply(made, reason, seconds)


def main(name: str, limit: float) -> None:
    """Serve until the input ends; `name` is a module with a `load`."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a peer prints is no reply
    module = import_module(name)
    try:
        planner: Planner = module.load()
    except PeerMissingError as error:
        pickle.dump(str(error), replies)
        return
    planner(WARM)
    # What imports left behind is not the peer's to look through in the middle of a plan.
    gc.collect()
    gc.freeze()
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
