"""Run peers where they can be stopped: each in a process of its own, with a limit on a plan's time.

The limit is CPU time, so that a loaded machine takes nothing from a peer; a peer that hangs without
computing is ended after `PATIENCE` times as long by the clock. Importing a peer is not counted.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from typing import IO

from dynapar.simulate.peers.request import PeerError, PeerMissingError, Plan, Reply, Request

LIMIT = 60.0
"""CPU seconds of one plan."""
PATIENCE = 10
"""Times the limit, by the clock."""
START = 120.0
"""Seconds by the clock in which a peer has to be imported."""


class PeerTimeoutError(PeerError):
    """A plan took longer than the limit."""


class PeerProcess:
    """One peer, started when it is first asked and again after it was stopped."""

    def __init__(self, module: str, *, limit: float = LIMIT) -> None:
        """Start nothing yet.

        Args:
            module: Name of a module with a `load` that gives a `Planner`.
            limit: CPU seconds of one plan.
        """
        self.module, self.limit = module, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._ready = False

    def ask(self, request: Request) -> tuple[Plan, float]:
        """A plan, and the CPU seconds that it took.

        Raises:
            PeerMissingError: The peer is not installed.
            PeerTimeoutError: It took longer than the limit, and was stopped.
            PeerError: It made no plan; says why.
        """
        process = self._running()
        assert process.stdin is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            reply: Reply = pickle.load(self._speaks(process, self.limit * PATIENCE))
        except (BrokenPipeError, EOFError):
            raise PeerError(self._ended()) from None
        if reply.plan is None:
            raise PeerError(reply.reason)
        return reply.plan, reply.seconds

    def start(self) -> None:
        """Begin to import the peer, without waiting for it."""
        if self._process is not None:
            return
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        root = Path(__file__).parents[3]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynapar.simulate.peers.worker", self.module, str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )

    def wait(self) -> None:
        """Wait until the peer is imported.

        Raises:
            PeerMissingError: It is not installed, or does not start.
        """
        self._running()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._said):
            if stream is not None and not stream.closed:
                with suppress(BrokenPipeError):  # what was still to be sent
                    stream.close()

    def _running(self) -> subprocess.Popen[bytes]:
        self.start()
        process = self._process
        assert process is not None
        if self._ready:
            return process
        try:
            missing: str = pickle.load(self._speaks(process, START))
        except EOFError:
            raise PeerMissingError(f"{self._ended()}; install what it needs") from None
        except PeerTimeoutError:
            raise PeerMissingError(f"it was not imported within {START:g} s; try again") from None
        if missing:
            self.close()
            raise PeerMissingError(missing)
        self._ready = True
        return process

    def _speaks(self, process: subprocess.Popen[bytes], seconds: float) -> IO[bytes]:
        """The process's replies, once there is one or their end."""
        assert process.stdout is not None
        if not select([process.stdout], [], [], seconds)[0]:
            self.close()
            raise PeerTimeoutError(f"timeout: no plan within {seconds:g} s by the clock")
        return process.stdout

    def _ended(self) -> str:
        """Why the process has ended by itself; forgets it.

        Raises:
            PeerTimeoutError: By its limit.
        """
        process, said = self._process, self._said
        assert process is not None
        assert said is not None
        code = process.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        self.close()
        if code == -signal.SIGPROF:
            raise PeerTimeoutError(f"timeout: no plan within {self.limit:g} s of CPU time")
        return f"it ended with {lines[-1] if lines else f'exit status {code}'}"


@cache
def peer(name: str) -> PeerProcess:
    """The process of a peer with the usual limit, shared by all who ask; it ends with ours."""
    process = PeerProcess(f"{__package__}.{name}")
    atexit.register(process.close)
    return process
