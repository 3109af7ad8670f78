"""The client of other model servers: recognizes, uses and measures them, without torch."""
