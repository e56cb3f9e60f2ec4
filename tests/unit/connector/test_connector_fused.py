"""The kernel that copies a whole piece: the same bytes as copying token by token."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, BLOCKS, HEADS, DIM = 3, 20, 2, 32


def caches(size, dtype, heads_first):
    shape = (BLOCKS, HEADS, size, 2 * DIM) if heads_first else (BLOCKS, size, HEADS, 2 * DIM)
    made = [torch.randn(shape, device="cuda").to(dtype) for _ in range(LAYERS)]
    return made if heads_first else [cache.permute(0, 2, 1, 3) for cache in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("size", "wire"), [(16, 16), (64, 16), (16, 32)])
def test_every_token_is_where_the_layout_says(dtype, heads_first, size, wire):
    from pdhub.connector.fused import FusedGather

    made = caches(size, dtype, heads_first)
    gather = FusedGather(made, heads=HEADS, block_tokens=wire)
    for skip, tokens in ((0, 1), (0, wire), (wire if size > wire else 0, 3 * wire + 5), (0, 5 * wire)):
        ids = torch.randperm(BLOCKS)[: -(-(skip + tokens) // size)].cuda()
        count = -(-tokens // wire)
        out = torch.full((count, LAYERS, 2, HEADS, wire, DIM), 7, dtype=dtype, device="cuda")
        gather(out.view(-1).view(torch.uint8), ids, skip, tokens)
        want = torch.zeros_like(out)
        for layer, cache in enumerate(made):
            rows = cache[ids].transpose(0, 1).flatten(1, 2)[:, skip : skip + tokens]
            for token in range(tokens):
                want[token // wire, layer, 0, :, token % wire] = rows[:, token, :DIM]
                want[token // wire, layer, 1, :, token % wire] = rows[:, token, DIM:]
        assert torch.equal(out, want)


def test_caches_that_differ_are_refused():
    from pdhub.connector.fused import FusedGather

    made = caches(16, torch.float32, True)
    with pytest.raises(ValueError, match="not alike"):
        FusedGather([*made, caches(16, torch.float32, False)[0]], heads=HEADS, block_tokens=16)
    with pytest.raises(ValueError, match="power of two"):
        FusedGather(made, heads=HEADS, block_tokens=24)
