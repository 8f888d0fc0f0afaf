"""Tables that a test may add to; what it adds is gone afterwards."""

from fnet.layers import activations
from train.config import registry


def copy_tables(monkeypatch):
    """Replace the tables of variants and of activations by copies."""
    list(registry.all_variants())  # imports fnet's own
    tables = {section: dict(known) for section, known in registry._VARIANTS.items()}
    monkeypatch.setattr(registry, "_VARIANTS", tables)
    monkeypatch.setattr(registry, "_plugins", set())
    monkeypatch.setattr(activations, "ACTIVATIONS", dict(activations.ACTIVATIONS))
