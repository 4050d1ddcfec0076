"""Families of models: formulas by building block, readers of their files, released values."""
