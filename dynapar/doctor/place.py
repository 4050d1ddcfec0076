"""Where this process stands among the ranks of a run, as its launcher says or as one would be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynapar.doctor.finding import Finding, ok, warn

TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
"""What launchers say that start several processes without telling torch about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The ranks of a run on this machine and on others."""

    ranks: int
    """In all."""
    local_ranks: int
    """On this machine."""
    gpus: int
    """On this machine, as torch sees them."""
    launched: bool
    """Whether a launcher such as torchrun says so; else a guess: one rank a GPU, here alone."""

    @property
    def several_machines(self) -> bool:
        """Whether ranks are on other machines too."""
        return self.ranks > self.local_ranks


def find_place(environ: Mapping[str, str], *, gpus: int, ranks: int | None = None) -> Place:
    """The place that a run started in this environment would have.

    Args:
        environ: The environment variables.
        gpus: That torch sees.
        ranks: What the user will start on this machine; None for one a GPU, or one alone.
    """
    world, local = (_number(environ.get(name)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world and local and "RANK" in environ:
        return Place(ranks=world, local_ranks=local, gpus=gpus, launched=True)
    here = ranks or max(1, gpus)
    return Place(ranks=here, local_ranks=here, gpus=gpus, launched=False)


def check_place(place: Place, environ: Mapping[str, str], *, cores: int) -> list[Finding]:
    """Judge how many ranks there are, and whether they have the cores that they need.

    Args:
        place: From `find_place`.
        environ: The environment variables.
        cores: That this process may run on.
    """
    rows = [_ranks(place, environ)]
    if place.local_ranks > cores:
        rows.append(
            warn(
                "cores",
                f"{cores} for {place.local_ranks} ranks",
                "start fewer ranks, or give the job more cores: each rank needs one of its own",
            )
        )
    else:
        rows.append(ok("cores", f"{cores} for {_count(place.local_ranks, 'rank')}"))
    return rows


def _ranks(place: Place, environ: Mapping[str, str]) -> Finding:
    if place.launched:
        return ok("ranks", f"{place.ranks}, {place.local_ranks} of them on this machine")
    for name in TASKS:
        if (_number(environ.get(name)) or 0) > 1:
            return warn(
                "ranks",
                f"{name} is {environ[name]}, but RANK and WORLD_SIZE are not set: each process "
                "would train alone",
                "start torchrun once a machine, and let it start the ranks",
                source="https://docs.pytorch.org/docs/stable/elastic/run.html",
            )
    guess = f"{_count(place.local_ranks, 'rank')} on this machine"
    return ok("ranks", f"not started by a launcher; looking for {guess} (--ranks)")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
