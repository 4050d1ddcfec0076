"""Measure what a model's work costs on the hardware at hand, and fit the planner's costs to it."""
