"""Mooncake's TransferEngine as a pdhub KV transport."""
