"""pdhub: one OpenAI endpoint in front of different LLM decode engines.

Importing this package is cheap on purpose (no torch, no fastapi): everything lives in submodules.
Plugin authors need only :mod:`pdhub.api` and, in their tests, :mod:`pdhub.testing`.
"""

__version__ = "0.1.0"
