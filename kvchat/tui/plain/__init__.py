"""The application line by line: for screen readers, pipes and terminals that can only print."""
