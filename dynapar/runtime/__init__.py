"""Run a step's plan on a model: microbatch module, executor, embedding routing, order check."""
