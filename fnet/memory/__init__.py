"""Where the memory goes: known from the compiled program, before it runs."""

from fnet.memory.arithmetic import Arithmetic, arithmetic
from fnet.memory.budget import in_words, read_bytes
from fnet.memory.donation import Donation, DonationError, donation
from fnet.memory.largest import largest
from fnet.memory.origins import Residual
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, compile_smallest, peak, tree_bytes
from fnet.memory.plan import BudgetError, Candidate, Plan, foresee, plan
from fnet.memory.policy import POLICIES, Policy
from fnet.memory.recomputation import Recomputation, RecomputationError, recomputation
from fnet.memory.residuals import LayerResiduals, by_layer, residuals
from fnet.memory.schedule import Buffer, Timeline, timeline
from fnet.memory.segments import recompute_in_segments

__all__ = [
    "CANDIDATE_OPTIONS",
    "POLICIES",
    "Arithmetic",
    "BudgetError",
    "Buffer",
    "Candidate",
    "Donation",
    "DonationError",
    "LayerResiduals",
    "Peak",
    "Plan",
    "Policy",
    "Recomputation",
    "RecomputationError",
    "Residual",
    "Timeline",
    "arithmetic",
    "by_layer",
    "compile_smallest",
    "donation",
    "foresee",
    "in_words",
    "largest",
    "peak",
    "plan",
    "read_bytes",
    "recomputation",
    "recompute_in_segments",
    "residuals",
    "timeline",
    "tree_bytes",
]
