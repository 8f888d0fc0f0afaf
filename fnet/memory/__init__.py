"""Where the memory goes: known from the compiled program, before it runs."""

from fnet.memory.arithmetic import Arithmetic, arithmetic
from fnet.memory.budget import format_bytes, parse_bytes
from fnet.memory.donation import Donation, DonationError, donation
from fnet.memory.largest import largest
from fnet.memory.origins import Residual
from fnet.memory.peak import CANDIDATE_OPTIONS, Peak, compile_min_memory, peak, tree_bytes
from fnet.memory.plan import BudgetError, Candidate, Plan, estimate_peak, plan
from fnet.memory.policy import REMAT_POLICIES, Policy
from fnet.memory.recomputation import Recomputation, RecomputationError, recomputation
from fnet.memory.residuals import LayerResiduals, by_layer, residuals
from fnet.memory.schedule import Buffer, Timeline, timeline
from fnet.memory.segments import remat_in_segments

__all__ = [
    "CANDIDATE_OPTIONS",
    "REMAT_POLICIES",
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
    "compile_min_memory",
    "donation",
    "estimate_peak",
    "format_bytes",
    "largest",
    "parse_bytes",
    "peak",
    "plan",
    "recomputation",
    "remat_in_segments",
    "residuals",
    "timeline",
    "tree_bytes",
]
