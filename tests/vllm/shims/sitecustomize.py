"""Python loads this at the start of every vLLM server under test: its engine is forked, as on GPUs.

On CPUs vLLM spawns it, and everything is imported a second time: nearly half of the work of a start. As after any fork,
the engine then keeps the API server's listening socket open, so that a killed API server's port answers nobody until
the engine is gone too.
"""

import multiprocessing

_get_context = multiprocessing.get_context


def _forked(method=None):
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forked
