"""The data of a report as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from dynapar.plan.schema import Json
from dynapar.report.model import Report
from dynapar.report.words import cards, in_short

FORM = 1
"""Version of the form; a change of meaning raises it."""


def report_to_json(report: Report) -> dict[str, Json]:
    """All that a report says, ready for `json.dumps`: its figures by name, and its sentences.

    Keys are the fields of `dynapar.report.model`; times are seconds, shares parts of 1.
    """
    figures = _plain(report)
    assert isinstance(figures, dict)
    return {"form": FORM, **summary(report), **figures}


def summary(report: Report) -> dict[str, Json]:
    """The head of a report: its first figures and its sentences."""
    return {
        "cards": {name: figure for figure, name in cards(report)},
        "in_short": [f"{figure} {text}" for figure, text in in_short(report)],
        "notes": list(report.notes),
    }


def _plain(value: object) -> Json:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    assert value is None or isinstance(value, str | int | float), type(value)
    return value
