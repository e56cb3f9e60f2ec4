"""Device memory: needs a CUDA device, torch and NIXL."""

import importlib.util

import pytest
from pdhub_nixl.plugin import NixlConfig, pdhub_register_transports

from pdhub.api import Region, TransferState, WriteOp

pytestmark = pytest.mark.gpu

(SPEC,) = pdhub_register_transports()
SIZE = 8 << 20


@pytest.fixture
def torch():
    if all(importlib.util.find_spec(f"nixl_{build}") is None for build in ("cu12", "cu13")):
        pytest.skip('NIXL is not installed: pip install "pdhub-nixl[cu13]"')
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch


@pytest.fixture
def pair(torch):
    node, sender = (SPEC.factory(NixlConfig(devices=["cpu", "cuda"])) for _ in range(2))
    node.open()
    sender.open()
    yield node, sender, sender.connect(node.export_metadata())
    sender.close()
    node.close()


def source(torch, sender, device):
    tensor = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device)
    if device == "cpu":
        region = Region("mine", tensor.data_ptr(), SIZE, owner=tensor)
    else:
        torch.cuda.synchronize()
        region = Region("mine", tensor.data_ptr(), SIZE, device, owner=tensor)
    return tensor, sender.register(region)


@pytest.mark.parametrize("source_device", ["cpu", "cuda:0"])
def test_bytes_reach_device_memory(torch, pair, source_device):
    node, sender, peer = pair
    tensor, region = source(torch, sender, source_device)
    target = node.allocate(SIZE, "cuda:0")
    assert target.device == "cuda:0"
    half = SIZE // 2
    ops = [WriteOp(region, 0, half, half), WriteOp(region, half, 0, half)]
    transfer = sender.write(peer, node.grant(target.id, "w"), ops)
    assert transfer.wait(30) is TransferState.DONE, transfer.error
    landed = target.owner[:SIZE].cpu()
    assert torch.equal(landed, torch.cat([tensor[half:], tensor[:half]]).cpu())


def test_a_fenced_landing_takes_nothing_more(torch, pair):
    node, sender, peer = pair
    _, region = source(torch, sender, "cuda:0")
    target = node.allocate(SIZE, "cuda:0")
    grant = node.grant(target.id, "w")
    assert sender.write(peer, grant, [WriteOp(region, 0, 0, SIZE)]).wait(30) is TransferState.DONE
    assert node.fence(target.id, 2.0)
    target.owner.zero_()
    assert sender.write(peer, grant, [WriteOp(region, 0, 0, SIZE)]).wait(30) is TransferState.FAILED
    assert not target.owner.any()
