"""Training on CPUs: faster convolutions, compiler options, workspaces, and the heap's gaps.

The page docs/cpu.md explains each of them.
"""
