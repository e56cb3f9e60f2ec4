"""NIXL as a pdhub KV transport."""
