"""What a sweep is to run: points, members, and the groups that one program can train."""
