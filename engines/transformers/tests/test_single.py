"""Attention of one token, for CUDA graphs: what plain attention computes, at every length."""

import pytest
import torch
from pdhub_transformers.rows import Geometry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "queries", "dim", "length"),
    [(3, 9, 64, 1), (3, 9, 64, 65), (8, 32, 128, 300), (8, 16, 64, 1000), (1, 1, 16, 64)],
)
def test_a_token_attends_over_its_row(dtype, heads, queries, dim, length):
    from pdhub_transformers.single import attend_one

    device = torch.device("cuda")
    row = Geometry(layers=3, heads=heads, dim=dim, dtype=dtype, device=device, block_tokens=16).row(1024)
    row.kv.normal_()
    query, key, value = (torch.randn((1, n, 1, dim), device=device).to(dtype) for n in (queries, heads, heads))
    where = torch.tensor([row.kv.data_ptr(), length - 1], device=device)
    got = attend_one(query, key, value, where, 2, row.tokens, dim**-0.5)
    keys, values = row.kv[2, 0, :, :, :length], row.kv[2, 1, :, :, :length]
    assert torch.equal(keys[:, :, -1], key[:, :, 0])
    assert torch.equal(values[:, :, -1], value[:, :, 0])
    want = torch.nn.functional.scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), enable_gqa=queries > heads
    )
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    assert (got.float() - want).abs().max() < limit


def test_heads_that_the_kernel_does_not_have_are_refused():
    from pdhub_transformers.single import SingleCache

    for dim in (8, 80):
        geometry = Geometry(
            layers=1, heads=1, dim=dim, dtype=torch.float32, device=torch.device("cuda"), block_tokens=4
        )
        with pytest.raises(ValueError, match=f"heads of {dim} values"):
            SingleCache(geometry, torch.zeros(2, dtype=torch.int64), 16)
