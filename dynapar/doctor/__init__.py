"""Look at the machine and the installation before a run does: what is fit, what hurts, and why."""
