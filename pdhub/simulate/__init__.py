"""The policy lab: the router's own policy, admission and latency model under a virtual clock, against engines that
are only cost models."""
