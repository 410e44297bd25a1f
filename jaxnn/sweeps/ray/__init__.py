"""The members of a sweep on the workers of a Ray cluster."""
