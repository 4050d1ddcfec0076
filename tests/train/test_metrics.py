from __future__ import annotations

import json
from pathlib import Path

from dynapar.train.metrics import METRICS, PLANS, MetricsWriter, read_steps


def test_a_run_that_goes_on_drops_what_it_will_run_again(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 0.1 * step}) + "\n" for step in range(4)]
    (tmp_path / METRICS).write_text("".join(lines) + '{"step": 4, "lo')
    MetricsWriter(tmp_path, start=2).close()
    assert (tmp_path / METRICS).read_text() == "".join(lines[:2])
    assert (tmp_path / PLANS).read_text() == ""


def test_a_line_that_was_cut_off_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 0}\n{"step": 1}')
    assert read_steps(path) == [{"step": 0}]
    assert read_steps(tmp_path / "none") == []
