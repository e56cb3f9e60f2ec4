"""Drives a presenter as the router does, and reads what a client would read."""

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from pdhub.api import Finished, FinishReason, TokenChunk, TokenLogprob
from pdhub.router.presentation import Envelope, Presenter, TextDecoder

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EOS = 1  # <|end|>
PROMPT = (5, 6, 7)


@dataclass
class Read:
    """What a client made of an answer."""

    text: str = ""
    finish: list[str] = field(default_factory=list)
    stop_reason: Any = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)


def present(tokenizer, body, endpoint=CHAT, **members) -> Presenter:
    eos = members.pop("eos_token_ids", {EOS})
    return Presenter(TextDecoder(tokenizer), envelope(**members), endpoint=endpoint, body=body, eos_token_ids=eos)


def envelope(**members) -> Envelope:
    given = {"cached_tokens": None, "prompt_token_ids": PROMPT} | members
    return Envelope(request_id="id-1", model="m", created=7, **given)


def chunk(*ids: int, top: int | None = None) -> TokenChunk:
    if top is None:
        return TokenChunk(ids)
    return TokenChunk(ids, tuple(TokenLogprob(i, -i / 8, tuple((i + k, -k / 2.0) for k in range(top))) for i in ids))


def engine(ids, body, max_tokens=10_000, cuts=(), eos=EOS) -> list[TokenChunk | Finished]:
    """The items of an engine that would sample ``ids`` without end, cut into chunks at ``cuts``."""
    ids = list(ids)[:max_tokens]
    enders = set(body.get("stop_token_ids") or ()) | (set() if body.get("ignore_eos") else {eos})
    low = body.get("min_tokens") or 0
    end = next((n for n, i in enumerate(ids, 1) if n > low and i in enders), None)
    ids = ids[:end]
    top = body.get("top_logprobs", 0) if body.get("logprobs") is True else body.get("logprobs")
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    items: list[TokenChunk | Finished] = [
        chunk(*ids[a:b], top=None if top is None or top is False else top)
        for a, b in itertools.pairwise(edges)
        if b > a
    ]
    reason = FinishReason.STOP if end else FinishReason.LENGTH
    return [*items, Finished(reason, len(ids), ids[-1] if end else None)]


def answer(presenter: Presenter, items, batch: int = 1) -> Read:
    """Feed everything, ``batch`` items at once, and read the stream or the document."""
    events: list[bytes] = []
    for n in range(0, len(items), batch):
        events += presenter.feed(items[n : n + batch])
        if presenter.stopped:
            break
    assert presenter.finished
    out = Read()
    if presenter.stream:
        _read_stream(b"".join(events + presenter.finish()), out)
    else:
        assert events == []
        document = json.loads(presenter.document())
        choice = document["choices"][0]
        assert len(document["choices"]) == 1
        _read_choice(choice, out, choice.get("message", {}).get("content", choice.get("text")))
        out.usage.append(document["usage"])
        out.chunks.append(document)
    return out


def _read_stream(data: bytes, out: Read) -> None:
    *lines, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for line in lines:
        assert line.startswith("data: ")
        assert "\n" not in line
        document = json.loads(line.removeprefix("data: "))
        out.chunks.append(document)
        if "usage" in document:
            out.usage.append(document["usage"])
        for choice in document["choices"]:
            assert not out.finish, "nothing comes after the finish reason"
            _read_choice(choice, out, choice.get("delta", {}).get("content", choice.get("text", "")))


def _read_choice(choice: dict[str, Any], out: Read, text: str) -> None:
    assert choice["index"] == 0
    out.text += text
    if choice["finish_reason"] is not None:
        out.finish.append(choice["finish_reason"])
        out.stop_reason = choice["stop_reason"]
    out.token_ids += choice.get("token_ids", [])
    logprobs = choice["logprobs"]
    if logprobs is None:
        return
    if "content" in logprobs:
        out.logprobs += logprobs["content"]
    else:
        assert len({len(v) for v in logprobs.values()}) == 1
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        out.logprobs += [dict(zip(names, row, strict=True)) for row in zip(*(logprobs[n] for n in names), strict=True)]
