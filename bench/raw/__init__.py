"""The plainest use of a native library: what its transport is measured against."""
