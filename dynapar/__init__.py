"""Per-step switching between context parallelism and data parallelism, with the exact gradient."""

__version__ = "0.1.0"
