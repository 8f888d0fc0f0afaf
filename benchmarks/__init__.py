"""One script a claim: python -m benchmarks.NAME.

A package, not a mere folder, because Opacus installs one of this name, which would win.
"""
