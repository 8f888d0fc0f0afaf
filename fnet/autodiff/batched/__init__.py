"""Many tangents or cotangents at one point; Jacobians and Hessian-vector products."""

from fnet.autodiff.batched.derivatives import hvps, jacobian, jvps, vjps

__all__ = ["hvps", "jacobian", "jvps", "vjps"]
