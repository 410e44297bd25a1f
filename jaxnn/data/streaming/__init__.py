"""Splits that do not lie in memory: their examples are read, decoded and augmented while the device computes."""
