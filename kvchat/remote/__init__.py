"""The client of other model servers: detects, uses and measures them, without torch."""
