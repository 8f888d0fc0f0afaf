"""The optimizer inside the backward pass, so that gradients of stacked layers never exist whole."""
