"""Programs that people use, unmodified, against the router: OpenAI's client, `vllm bench serve`, curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Literal

import openai
import pytest
from api_cases import COMPACT
from pydantic import BaseModel

pytestmark = pytest.mark.world("api")
MESSAGES = [{"role": "user", "content": "Name a river."}]


@pytest.fixture
def client(world, pool):
    found = openai.OpenAI(base_url=f"{world.router_url}/v1", api_key="none", default_headers=world.via(pool))
    yield found
    found.close()


class Person(BaseModel):
    name: Literal["Ada", "Kurt"]
    age: int


class Greeting(BaseModel):
    whom: Literal["Ada", "Kurt"]


def test_openai_client_lists_the_model_and_answers(client):
    assert [model.id for model in client.models.list()] == ["m"]
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    whole = client.completions.create(model="m", prompt="Once", max_tokens=8, temperature=0, logprobs=2)
    assert len(whole.choices[0].logprobs.token_logprobs) == 8


def test_openai_client_streams(client):
    arguments = {"model": "m", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    usage, text, reasons = [], "", []
    with client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}) as stream:
        for event in stream:
            usage += [event.usage] if event.usage else []
            for choice in event.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert (reasons, [u.completion_tokens for u in usage]) == (["length"], [8])


def test_openai_client_parses_structures_and_calls_tools(client):
    parsed = client.chat.completions.parse(
        model="m",
        messages=MESSAGES,
        response_format=Person,
        max_tokens=120,
        temperature=0,
        extra_body={
            "structured_outputs": {"regex": r'\{"name": "(Ada|Kurt)", "age": \d{2}\}'},
            "response_format": None,
        },
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    tools = [openai.pydantic_function_tool(Greeting, name="greet")]
    named = {"type": "function", "function": {"name": "greet"}}
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=tools, tool_choice=named, max_tokens=200, temperature=0, logit_bias=COMPACT
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "greet"


def test_openai_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=MESSAGES)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_vllm_bench_serve(world, vllm, full, tmp_path, backend, pool):
    """200 requests, all well. It always streams."""
    if not full and (backend, pool) not in (("openai", "pull"), ("openai-chat", "whole")):
        pytest.skip("in the full run")
    count = 200 if full or pool == "pull" else 40
    figures = bench(world, vllm, tmp_path, backend, pool, count)
    assert (figures["completed"], figures["failed"]) == (count, 0)
    assert figures["total_output_tokens"] == 8 * count
    assert 0 < figures["median_ttft_ms"] < figures["median_e2el_ms"]


@pytest.mark.timeout(1200)
async def test_two_hundred_answers_without_streams(world, full, pool):
    """`vllm bench serve` takes nothing but streams, from vLLM too."""
    count = 200 if full or pool == "pull" else 40
    limit = asyncio.Semaphore(8)
    async with openai.AsyncOpenAI(
        base_url=f"{world.router_url}/v1", api_key="none", default_headers=world.via(pool), max_retries=0
    ) as client:

        async def ask(number):
            async with limit:
                return await client.completions.create(
                    model="m", prompt=f"{number} " * 20, max_tokens=8, extra_body={"ignore_eos": True}
                )

        answers = await asyncio.gather(*map(ask, range(count)))
    assert {answer.usage.completion_tokens for answer in answers} == {8}
    assert len({answer.id for answer in answers}) == count


def bench(world, vllm, directory, backend, pool, count):
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    headers = [f"{name}={value}" for name, value in world.via(pool).items()]
    model = world.data["model"]["path"]
    command = [
        vllm, "bench", "serve", "--backend", backend, "--base-url", world.router_url, "--endpoint", path,
        "--model", "m", "--tokenizer", model, "--dataset-name", "random", "--random-input-len", "40",
        "--random-output-len", "8", "--num-prompts", str(count), "--max-concurrency", "8", "--ignore-eos",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--header", *headers, "--disable-tqdm",
        "--save-result", "--result-dir", str(directory), "--result-filename", "figures.json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads((directory / "figures.json").read_text())


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl(world, pool):
    header = [word for name, value in world.via(pool).items() for word in ("-H", f"{name}: {value}")]
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 6, "temperature": 0})
    url = f"{world.router_url}/v1/chat/completions"
    command = ["curl", "-sS", "--fail-with-body", "--max-time", "120", *header, "-H", "Content-Type: application/json"]
    whole = subprocess.run([*command, url, "-d", body], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    streamed = subprocess.run(
        [*command, "-N", url, "-d", json.dumps({**json.loads(body), "stream": True})], capture_output=True, text=True
    )
    assert streamed.stdout.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in streamed.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == json.loads(whole.stdout)["choices"][0]["message"]["content"]
    wrong = subprocess.run([*command, url, "-d", "{"], capture_output=True, text=True)
    assert wrong.returncode == 22, "curl's word for an HTTP error"
    assert json.loads(wrong.stdout)["error"]["message"]
