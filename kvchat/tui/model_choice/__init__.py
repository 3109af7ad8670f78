"""The model in use and another in its place: choosing, downloading, planning."""
