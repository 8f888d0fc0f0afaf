"""Differentially private training: sampling, noise and privacy accounting.

Clipping is `fnet.clipped_grad`, and `fnet.autodiff.clipped` is the gradient mode that clips and
adds noise.
"""

from typing import TYPE_CHECKING

from fnet import lazy

if TYPE_CHECKING:
    from fnet.noise.correlated import Strategy as Strategy
    from fnet.noise.correlated import banded_inverse_square_root as banded_inverse_square_root
    from fnet.noise.correlated import banded_square_root as banded_square_root
    from fnet.noise.gaussian import add_noise as add_noise
    from fnet.privacy.accounting import calibrate_noise_multiplier as calibrate_noise_multiplier
    from fnet.privacy.accounting import epsilon as epsilon
    from fnet.privacy.sampling import PoissonSampling as PoissonSampling
    from fnet.privacy.sampling import Sampling as Sampling
    from fnet.privacy.sensitivity import check_sensitivity as check_sensitivity
else:
    lazy.import_names_late(__name__)
