"""Many tangents or cotangents at one point; Jacobians and Hessian-vector products."""
