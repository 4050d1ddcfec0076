"""Check on a user's own configuration that no layout changes the gradient."""

from dynapar.verify.command import verify_command

__all__ = ["verify_command"]
