"""Engine clients that come with the host."""
