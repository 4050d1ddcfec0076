"""Replay planned steps, and set them beside what others would do with the same samples."""

from dynapar.simulate.noise import Noise as Noise
from dynapar.simulate.noise import expected_makespan as expected_makespan
from dynapar.simulate.replay import Timeline as Timeline
from dynapar.simulate.replay import replay as replay
from dynapar.simulate.schedule import Schedule as Schedule
from dynapar.simulate.schedule import from_plan as from_plan
