"""Networks: fields of the section ``model``, and how each one is built."""
