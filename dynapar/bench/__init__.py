"""Measure layouts and costs on the ranks of this machine."""
