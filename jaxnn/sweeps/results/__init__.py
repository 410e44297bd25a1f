"""What the members of a sweep came to: tables, intervals, comparisons."""
