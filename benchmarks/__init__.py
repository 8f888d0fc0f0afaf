"""Benchmarks: ``python -m benchmarks.NAME`` runs one script, ``python -m benchmarks`` all of them.

This is a package, because Opacus installs a package of the same name, which would take precedence
over a plain folder.
"""
