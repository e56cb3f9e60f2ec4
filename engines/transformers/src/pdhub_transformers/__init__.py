"""Hugging Face Transformers for pdhub: decode engine and embedded prefill. Importing this loads nothing heavy."""
