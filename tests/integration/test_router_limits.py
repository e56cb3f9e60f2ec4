"""What an engine would refuse is known before prefill: it goes to a pool that can, or is one clear 400."""

import json

import pytest
from router_fakes import TEXT, Engine, Node, Prefill, answer_json, router_before

pytestmark = pytest.mark.integration

NATIVE = {"choices": [{"index": 0, "text": "native", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
TIGHT = {"x-slo-tpot-ms": "5"}
WIDE = ["top_k", "sampling", "seed", "logprobs", "logit_bias", "min_tokens"]


class Limited(Node):
    """Its sampler has more features than the fake prefill instance, and limits."""

    def info(self):
        limits = {"max_context": 500, "max_logprobs": 5, "max_top_k": 255, "logprobs_from": 0.2}
        return super().info() | {"capabilities": {"features": WIDE, **limits}}


class Narrow(Prefill):
    """Cannot do what it is not said to."""

    def __init__(self, *features, logprobs=5):
        super().__init__()
        self.told = {"features": list(features), "max_context": 500, "max_logprobs": logprobs}

    async def _info(self, request):
        told = json.loads((await super()._info(request)).body)
        return await answer_json(told | {"capabilities": self.told})(request)


def untouched(node, prefill):
    return (node.claims, node.decodes, prefill.seen) == ([], [], [])


@pytest.mark.parametrize("members", [{"top_k": 256}, {"logprobs": 6}, {"logprobs": 1, "temperature": 0.1}])
async def test_a_value_beyond_a_nodes_limit_goes_elsewhere_before_prefill(tmp_path, members):
    node, prefill, native = Limited(), Narrow(*WIDE, logprobs=20), Engine(answer_json(NATIVE))
    body = {"temperature": 0.9} | members
    async with router_before({"fast": [node], "native": [native]}, [prefill], tmp_path=tmp_path) as running:
        status, raw, headers = await running.post(TEXT | body, **TIGHT)
        assert (status, headers["x-pdhub-pool"]) == (200, "native"), raw
        assert untouched(node, prefill)
        status, raw, headers = await running.post(TEXT | {"top_k": 255, "temperature": 0.9}, **TIGHT)
        assert (status, headers["x-pdhub-pool"]) == (200, "fast"), raw


async def test_a_value_beyond_every_limit_is_one_400_that_names_it(tmp_path):
    node, prefill = Limited(), Narrow(*WIDE, logprobs=20)
    async with router_before({"fast": [node]}, [prefill], tmp_path=tmp_path) as running:
        for member, body in {"top_k": {"top_k": 300}, "logprobs": {"logprobs": 6}}.items():
            status, raw, _ = await running.post(TEXT | {"temperature": 0.9} | body)
            error = json.loads(raw)["error"]
            assert (status, error["code"], error["param"]) == (400, "unsupported", member), raw
        assert untouched(node, prefill)


@pytest.mark.parametrize(
    ("members", "able", "param"),
    [
        ({"seed": 3}, {"logprobs": 20}, "seed"),
        ({"min_tokens": 2}, {"logprobs": 20}, "min_tokens"),
        ({"logprobs": 2}, {"logprobs": 1}, "logprobs"),
    ],
)
async def test_what_no_prefill_instance_can_do_goes_elsewhere_or_is_a_400(tmp_path, members, able, param):
    body = TEXT | {"temperature": 0.9} | members
    node, prefill = Limited(), Narrow("sampling", "logprobs", **able)
    async with router_before({"fast": [node]}, [prefill], tmp_path=tmp_path) as running:
        status, raw, _ = await running.post(body)
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported", param), raw
        assert untouched(node, prefill)
    node, prefill, native = Limited(), Narrow("sampling", "logprobs", **able), Engine(answer_json(NATIVE))
    async with router_before({"fast": [node], "native": [native]}, [prefill], tmp_path=tmp_path) as running:
        status, raw, headers = await running.post(body, **TIGHT)
        assert (status, headers["x-pdhub-pool"]) == (200, "native"), raw
        assert untouched(node, prefill)


async def test_an_able_prefill_instance_that_is_away_is_no_400(tmp_path):
    node, narrow, able = Limited(), Narrow("sampling"), Narrow(*WIDE)
    async with router_before({"fast": [node]}, [narrow, able], tmp_path=tmp_path) as running:
        assert (await running.post(TEXT | {"seed": 3, "temperature": 0.9}))[0] == 200
        assert narrow.seen == []
        await able.close()
        for _ in range(2):
            status, raw, _ = await running.post(TEXT | {"seed": 3, "temperature": 0.9})
            assert status in (502, 503), raw
        assert narrow.seen == []


async def test_a_node_that_cannot_after_all_sends_the_request_on(tmp_path):
    """Its limits may be newer than the last probe."""
    refusal = {"error": {"message": "not any more", "code": "unsupported", "param": "top_k", "type": "x"}}
    node, prefill, native = Limited(), Narrow(*WIDE), Engine(answer_json(NATIVE))
    node.scripts["/decode"] = answer_json(refusal, status=400)
    body = TEXT | {"top_k": 9, "temperature": 0.9}
    async with router_before({"fast": [node], "native": [native]}, [prefill], tmp_path=tmp_path) as running:
        status, raw, headers = await running.post(body, **TIGHT)
        assert (status, headers["x-pdhub-pool"]) == (200, "native"), raw
    node, prefill = Limited(), Narrow(*WIDE)
    node.scripts["/decode"] = answer_json(refusal, status=400)
    async with router_before({"fast": [node]}, [prefill], tmp_path=tmp_path) as running:
        status, raw, _ = await running.post(body)
        assert (status, json.loads(raw)["error"]["param"]) == (400, "top_k"), raw
