"""Tables of numbers and categories, and their columns as bins."""
