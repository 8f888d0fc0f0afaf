"""Memory of a training step, known from the traced or compiled program before it runs."""

from typing import TYPE_CHECKING

from fnet import lazy

if TYPE_CHECKING:
    from fnet.memory.cost import Cost as Cost
    from fnet.memory.cost import estimate_cost as estimate_cost
    from fnet.memory.donation import Donation as Donation
    from fnet.memory.donation import DonationError as DonationError
    from fnet.memory.donation import donation as donation
    from fnet.memory.fit import remat_to_fit as remat_to_fit
    from fnet.memory.host_state import state_on_host as state_on_host
    from fnet.memory.peak import CANDIDATE_OPTIONS as CANDIDATE_OPTIONS
    from fnet.memory.peak import Peak as Peak
    from fnet.memory.peak import compile_min_memory as compile_min_memory
    from fnet.memory.peak import peak as peak
    from fnet.memory.plan import BudgetError as BudgetError
    from fnet.memory.plan import Candidate as Candidate
    from fnet.memory.plan import Plan as Plan
    from fnet.memory.plan import estimate_peak as estimate_peak
    from fnet.memory.plan import largest_size as largest_size
    from fnet.memory.plan import plan as plan
    from fnet.memory.remat import REMAT_POLICIES as REMAT_POLICIES
    from fnet.memory.remat import Policy as Policy
    from fnet.memory.remat import remat_in_segments as remat_in_segments
    from fnet.memory.residuals import Residual as Residual
    from fnet.memory.residuals import by_layer as by_layer
    from fnet.memory.residuals import residuals as residuals
    from fnet.memory.sizes import LayerResiduals as LayerResiduals
    from fnet.memory.sizes import format_bytes as format_bytes
    from fnet.memory.sizes import parse_bytes as parse_bytes
    from fnet.memory.sizes import tree_bytes as tree_bytes
    from fnet.memory.timeline import Buffer as Buffer
    from fnet.memory.timeline import Timeline as Timeline
    from fnet.memory.timeline import timeline as timeline
else:
    lazy.import_names_late(__name__)
