"""A decode step of one request as one CUDA graph: launching a model's kernels one by one takes longer than they run."""

from __future__ import annotations

import torch
from torch import Tensor

from pdhub_transformers.attention import Feed
from pdhub_transformers.model import LoadedModel
from pdhub_transformers.rows import Geometry, Row
from pdhub_transformers.single import SingleCache

WARM_UPS = 3


class GraphedStep:
    """Captured once; serves every row of one size, at every length. For one thread.

    Args:
        model: not yet graphed. row: any of its rows; the others must be as long. What is in it is overwritten.
        compiled: let torch compile the step first, which takes about a minute and fuses small operations.

    Raises:
        ValueError: heads of a size that the kernel does not have.
        RuntimeError: the graph computes something else than the model.
        Exception: what compilers and the capture raise.
    """

    def __init__(self, model: LoadedModel, row: Row, *, compiled: bool = False) -> None:
        geometry = model.geometry
        assert isinstance(geometry, Geometry), "latent rows have no graph"
        device = geometry.device
        self._rows = row.tokens
        # address of the row, position, token: one copy to the device a step
        self._host = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self._given = torch.zeros(3, dtype=torch.int64, device=device)
        ids, positions = self._given[2:3].unsqueeze(0), self._given[1:2].unsqueeze(0)

        def step() -> Tensor:
            cache = SingleCache(geometry, self._given[:2], row.tokens)
            logits: Tensor = model.forward(ids, positions, cache)
            return logits[:, -1]

        run = torch.compile(step, dynamic=False) if compiled else step
        self._give(Feed(row, 0, (1,)))
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=beside, capture_error_mode="thread_local"):
            self._logits = run()
        self._check(model, row)

    def fits(self, feed: Feed) -> bool:
        """Whether :meth:`step` can compute it."""
        row = feed.row
        return len(feed.tokens) == 1 and isinstance(row, Row) and row.tokens == self._rows

    def step(self, feed: Feed) -> Tensor:
        """Logits ``[1, vocabulary]``, valid until the next step."""
        self._give(feed)
        self._graph.replay()
        return self._logits

    def _give(self, feed: Feed) -> None:
        self._host[0], self._host[1], self._host[2] = feed.row.kv.data_ptr(), feed.start, feed.tokens[0]
        self._given.copy_(self._host, non_blocking=True)

    def _check(self, model: LoadedModel, row: Row) -> None:
        tolerance = 1e-3 if model.geometry.dtype is torch.float32 else 0.1
        for start, token in enumerate((1, 2, 3, 5, 8)):
            feed = Feed(row, start, (token % model.vocabulary,))
            want = model.decode([feed])
            got = self.step(feed)
            if not torch.allclose(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max())):
                raise RuntimeError("the graph computes something else than the model")
