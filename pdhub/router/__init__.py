"""The OpenAI-facing process: admits, chooses, relays."""
