"""Tasks: what is learned from which data, and what tells whether it worked."""
