from __future__ import annotations

import subprocess
import sys

RANK = """
import sys, threading
from dynapar.train.parent import follow_parent
follow_parent(poll_seconds=0.01)
print("up", flush=True)
threading.Event().wait()
"""
LAUNCHER = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {RANK!r}]).wait()
"""


def test_a_rank_ends_with_its_launcher() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "up\n"
    launcher.kill()
    # The pipes are the rank's as well: they close when it ends.
    out, err = launcher.communicate()
    assert out == ""
    assert err == f"launcher {launcher.pid} is gone: rank ends\n"
