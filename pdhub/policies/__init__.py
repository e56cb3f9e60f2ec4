"""Routing policies that come with the host, written as plugins."""
