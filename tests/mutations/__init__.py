"""Small wrong changes to the core equations, by room; the tests must notice every one.

`python -m tests.mutations` makes them one after the other in a copy of the repository.
"""

from tests.mutations import (
    clipping,
    context,
    diffusion,
    in_place,
    losses,
    norms,
    pooling,
    reversible,
    steps,
)
from tests.mutations.mutation import Mutation

ROOMS: dict[str, list[Mutation]] = {
    "in-place norm": in_place.MUTATIONS,
    "norms": norms.MUTATIONS,
    "pooling": pooling.MUTATIONS,
    "attention context": context.MUTATIONS,
    "clipping": clipping.MUTATIONS,
    "losses": losses.MUTATIONS,
    "reversible": reversible.MUTATIONS,
    "diffusion": diffusion.MUTATIONS,
    "train step": steps.MUTATIONS,
}
