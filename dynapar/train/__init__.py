"""Train a model from a configuration file: loop, checkpoints, resume."""
