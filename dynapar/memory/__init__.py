"""How many bytes a rank needs for a microbatch, and what fits into a budget of them.

Plain formulas: no torch, nothing measured at run time. `dynapar.memory.activations` has what layers
keep, `states` what stays between microbatches, `model` puts both together, by recompute policy.
"""

from dynapar.memory.budget import CAPACITY_NEEDS as CAPACITY_NEEDS
from dynapar.memory.budget import parse_bytes as parse_bytes
from dynapar.memory.budget import shown as shown
from dynapar.memory.limits import MemoryLimits as MemoryLimits
from dynapar.memory.limits import Piece as Piece
from dynapar.memory.limits import PolicyLimits as PolicyLimits
from dynapar.memory.model import MemoryModel as MemoryModel
from dynapar.memory.model import memory_limits as memory_limits
from dynapar.memory.policies import POLICIES as POLICIES
from dynapar.memory.policies import Policy as Policy
from dynapar.memory.policies import costs_under as costs_under
from dynapar.memory.policies import parse_policies as parse_policies
from dynapar.memory.policies import transfer_price as transfer_price
from dynapar.memory.states import SHARDINGS as SHARDINGS
from dynapar.memory.states import Sharding as Sharding
