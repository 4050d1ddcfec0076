"""Decide which ranks run which samples: arrays in, arrays out."""
