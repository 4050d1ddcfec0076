"""All positions of a ring in one process, each in a thread: degrees beyond the number of cores."""

from dynapar.bench.loopback import LoopbackPending, LoopbackTransport, Queues, run_loopback

__all__ = ["LoopbackPending", "LoopbackTransport", "Queues", "run_loopback"]
