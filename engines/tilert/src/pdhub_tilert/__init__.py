"""TileRT for pdhub."""
