"""The plan of one optimizer step: what it holds, its JSON form, and its validator."""

from dynapar.plan.check import validate as validate
from dynapar.plan.columns import PlanColumns as PlanColumns
from dynapar.plan.form import PlanFormError as PlanFormError
from dynapar.plan.form import plan_digest as plan_digest
from dynapar.plan.form import plan_from_json as plan_from_json
from dynapar.plan.form import plan_to_json as plan_to_json
from dynapar.plan.model import StepPlan as StepPlan
from dynapar.plan.model import Sync as Sync
from dynapar.plan.records import MicroBatch as MicroBatch
from dynapar.plan.records import Parts as Parts
from dynapar.plan.records import Placement as Placement
from dynapar.plan.records import Wave as Wave
