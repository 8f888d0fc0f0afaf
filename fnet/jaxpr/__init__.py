"""Traced programs: interpret them, follow values through them, rewrite them.

`interpreter` evaluates a jaxpr equation by equation, and `primitives` reads what an equation does.
`axes` states, for every primitive, which axis of an operand is which axis of a result.
`arrangements` and `linearity` state which equations only move elements, and which are linear. A
`Layout` says which element of an array is where. `propagation` follows any state, such as an axis,
through equations, calls, loops and branches: `Propagation` from arguments to results, and
`BackwardPropagation` back. An `Executor` computes with values of its own kind in place of arrays.
"""

from fnet.jaxpr.arrangements import Arrangement as Arrangement
from fnet.jaxpr.arrangements import arrangements as arrangements
from fnet.jaxpr.axes import Factor as Factor
from fnet.jaxpr.axes import Row as Row
from fnet.jaxpr.axes import combines_devices as combines_devices
from fnet.jaxpr.axes import counted_factor as counted_factor
from fnet.jaxpr.axes import factors as factors
from fnet.jaxpr.axes import is_cheap as is_cheap
from fnet.jaxpr.axes import is_elementwise as is_elementwise
from fnet.jaxpr.axes import is_identity as is_identity
from fnet.jaxpr.axes import is_indexing as is_indexing
from fnet.jaxpr.axes import is_linear_in as is_linear_in
from fnet.jaxpr.axes import is_separable as is_separable
from fnet.jaxpr.axes import joined_axis as joined_axis
from fnet.jaxpr.axes import lengthen as lengthen
from fnet.jaxpr.axes import moves_elements as moves_elements
from fnet.jaxpr.axes import places_once as places_once
from fnet.jaxpr.axes import register as register
from fnet.jaxpr.axes import renames as renames
from fnet.jaxpr.axes import row_of as row_of
from fnet.jaxpr.axes import rows_by_position as rows_by_position
from fnet.jaxpr.axes import separate_factor as separate_factor
from fnet.jaxpr.axes import slope as slope
from fnet.jaxpr.axes import stops_gradients as stops_gradients
from fnet.jaxpr.axes import with_dtypes as with_dtypes
from fnet.jaxpr.execution import Executor as Executor
from fnet.jaxpr.interpreter import CHECKPOINT as CHECKPOINT
from fnet.jaxpr.interpreter import CUSTOM_DERIVATIVES as CUSTOM_DERIVATIVES
from fnet.jaxpr.interpreter import AnyPrimitive as AnyPrimitive
from fnet.jaxpr.interpreter import Atom as Atom
from fnet.jaxpr.interpreter import Scan as Scan
from fnet.jaxpr.interpreter import ShardMap as ShardMap
from fnet.jaxpr.interpreter import While as While
from fnet.jaxpr.interpreter import argument_names as argument_names
from fnet.jaxpr.interpreter import aval as aval
from fnet.jaxpr.interpreter import bind as bind
from fnet.jaxpr.interpreter import call_in_place as call_in_place
from fnet.jaxpr.interpreter import call_like as call_like
from fnet.jaxpr.interpreter import called_jaxpr as called_jaxpr
from fnet.jaxpr.interpreter import custom_function as custom_function
from fnet.jaxpr.interpreter import dependencies as dependencies
from fnet.jaxpr.interpreter import differentiate as differentiate
from fnet.jaxpr.interpreter import evaluate as evaluate
from fnet.jaxpr.interpreter import evaluate_from as evaluate_from
from fnet.jaxpr.interpreter import find_equations as find_equations
from fnet.jaxpr.interpreter import has_forward_derivative as has_forward_derivative
from fnet.jaxpr.interpreter import in_scopes as in_scopes
from fnet.jaxpr.interpreter import inline as inline
from fnet.jaxpr.interpreter import inner_jaxprs as inner_jaxprs
from fnet.jaxpr.interpreter import interpret as interpret
from fnet.jaxpr.interpreter import is_checkpoint as is_checkpoint
from fnet.jaxpr.interpreter import is_floating as is_floating
from fnet.jaxpr.interpreter import is_reference as is_reference
from fnet.jaxpr.interpreter import located as located
from fnet.jaxpr.interpreter import nbytes as nbytes
from fnet.jaxpr.interpreter import part_of_jaxpr as part_of_jaxpr
from fnet.jaxpr.interpreter import place as place
from fnet.jaxpr.interpreter import rewrite as rewrite
from fnet.jaxpr.interpreter import scopes as scopes
from fnet.jaxpr.interpreter import source_line as source_line
from fnet.jaxpr.interpreter import splice as splice
from fnet.jaxpr.interpreter import switch as switch
from fnet.jaxpr.interpreter import transformed as transformed
from fnet.jaxpr.layout import Factors as Factors
from fnet.jaxpr.layout import Layout as Layout
from fnet.jaxpr.layout import NoLayoutError as NoLayoutError
from fnet.jaxpr.layout import merged as merged
from fnet.jaxpr.linearity import has_backward_rule as has_backward_rule
from fnet.jaxpr.linearity import has_small_range as has_small_range
from fnet.jaxpr.linearity import is_linear as is_linear
from fnet.jaxpr.linearity import rounds_coarsely as rounds_coarsely
from fnet.jaxpr.linearity import solver as solver
from fnet.jaxpr.propagation import BackwardPropagation as BackwardPropagation
from fnet.jaxpr.propagation import Dependence as Dependence
from fnet.jaxpr.propagation import Propagation as Propagation
from fnet.jaxpr.propagation import Site as Site
from fnet.jaxpr.propagation import active_variables as active_variables
from fnet.jaxpr.propagation import depends_on as depends_on
