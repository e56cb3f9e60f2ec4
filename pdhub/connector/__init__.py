"""The part of pdhub that lives inside vLLM: a producer-only KV connector over :mod:`pdhub.sender`.

Only ``vllm.py`` imports vLLM and only ``gather.py``, ``memory.py`` and ``source.py`` import torch; the bookkeeping of
both sides (``ledger.py`` in the scheduler, ``pump.py`` in the workers) knows neither.
"""
