"""One script a claim: python -m benchmarks.NAME. All of them, as one table: python -m benchmarks.

A package, not a mere folder, because Opacus installs one of this name, which would win.
"""
