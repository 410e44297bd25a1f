"""A sweep drawn."""
