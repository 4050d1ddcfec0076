"""Exact attention over a packed microbatch that one rank holds or several share."""
