"""Per-example gradients: clipping, norms and privacy without materializing each gradient."""
