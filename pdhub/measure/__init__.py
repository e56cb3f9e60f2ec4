"""Measurements that a user runs on their own machines: ``pdhub handoff-bench``."""
