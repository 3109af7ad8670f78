"""Line mode, for screen readers, pipes and terminals that can only print."""
