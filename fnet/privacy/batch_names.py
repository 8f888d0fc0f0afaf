"""Names of arrays in batches of private training."""

CANARY = "canary"
"""Name of the array [batch] in a batch: the number of the canary, -1 for other examples."""
EXAMPLE_WEIGHT = "example_weight"
"""Name of the array [users, k] in a batch: 1 for an example, 0 for padding."""
