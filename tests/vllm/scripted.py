"""A model that says what a test wants: every token has one that follows it; of several the request chooses.

It is the tiny model of ``tools/tiny_models.py`` with silent layers, so that the last token alone decides, and with
tokens of whole words, reasoning tags among them. A chat whose last message is an assistant's to be continued, ending
with the letter of a script, is answered with that script.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

THINK, END_THINK = "<think>", "</think>"
END = "<|im_end|>"

SCRIPTS: dict[str, list[str]] = {
    "A": [THINK, "let me ", "think é", "…", END_THINK, "The answer ", "is 42", " indeed", END],
    "B": ["no tags ", "at all", " here", END],
    "C": [
        THINK, "the weather", "? ", END_THINK, "\nI ask. ", "<tool", '_call>\n{"na', 'me": "weat', 'her", "argu',
        'ments": {"ci', 'ty": "Köln', '", "days": 3', "}}\n</to", "ol_call>", END,
    ],
    "D": [
        '<tool_call>{"name": "time", ', '"arguments": {"city": "Rome"}}', "</tool_call>", ' <tool_call>\n{"name": ',
        '"weather", "arguments"', ': {"city": "Bo', 'nn"}}\n</tool_call>', END,
    ],
    "E": [THINK, "cut short", " in the middle", " of a thought", END],
    "F": ["before ", END_THINK, "an end without ", "a beginning", END],
    "G": ["call broken ", '<tool_call>\n{"name": "weather", "arg', "uments: oops", "\n</tool_call> and", " on", END],
    "H": [THINK, "one STOP two", END_THINK, "three ST", "OP four", " <tool_call>", '{"name": "w"', "}!", END],
    "I": [THINK, END_THINK, "nothing thought", END],
    "J": ["a < b, <tool", "s> are no calls, nor is <tool_cal", END],
    "K": [THINK, " \n", "spaces ", END_THINK, "\n\n", "after", "\n \n", END],
}  # fmt: skip
"""By letter. Tokens that several have (tags, the end) are followed by what the request's bias asks for."""

_BIAS = 10.0
_STRONG, _APART = 24.0, 0.2


def write(out: Path) -> None:
    """The model's directory."""
    tiny = _tiny_models()
    tiny.write("qwen3", out)
    words = _words()
    _tokenizer(out / "tokenizer.json", words)
    ids = _ids(words)
    assert all(len(word.encode()) > 1 for word in words), "bytes are tokens already"
    size = 64 * math.ceil((ids[words[-1]] + 1) / 64)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "vocab_size": size}, indent=1))
    tiny.VOCABULARY = size
    weights, _ = tiny.qwen3()
    save_file(_wired(weights.tensors, ids, tiny.HIDDEN), str(out / "model.safetensors"), metadata={"format": "pt"})


def asking(letter: str, **members: Any) -> dict[str, Any]:
    """A chat request that is answered with a script.

    ``members`` replace others; ``logit_bias`` is added to.
    """
    ids = _ids(_words())
    chosen = {str(ids[word]): _BIAS for word in SCRIPTS[letter] if word not in (THINK, END)}
    bias = {**chosen, **members.pop("logit_bias", {})}
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": letter}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "temperature": 0,
        "max_tokens": 40,
        "logit_bias": bias,
        **members,
    }


def _words() -> list[str]:
    return list(dict.fromkeys(word for script in SCRIPTS.values() for word in script if word != END))


def _ids(words: list[str]) -> dict[str, int]:
    """Behind the three specials and the 256 bytes."""
    first = 3 + 256
    return {**{word: first + place for place, word in enumerate(words)}, END: 2}


def _tokenizer(file: Path, words: list[str]) -> None:
    document = json.loads(file.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for word, token_id in _ids(words).items():
        if word != END:
            document["added_tokens"].append({"id": token_id, "content": word, **flags})
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False))


def _wired(tensors: dict[str, torch.Tensor], ids: dict[str, int], hidden: int) -> dict[str, torch.Tensor]:
    """Silent layers; the head says after each token of a script what follows it there."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    follows: dict[int, list[int]] = {}
    for letter, script in SCRIPTS.items():
        before = 3 + ord(letter)
        for word in script:
            follows.setdefault(before, []).append(ids[word])
            before = ids[word]
    states = tensors["model.embed_tokens.weight"][list(follows)]
    states = states / states.norm(dim=1, keepdim=True) * math.sqrt(hidden)  # as the last norm leaves them
    said = sorted(set(ids.values()))
    logits = torch.zeros(len(follows), len(said))
    for row, after in enumerate(follows.values()):
        for rank, token_id in enumerate(dict.fromkeys(after)):
            logits[row, said.index(token_id)] = _STRONG - _APART * rank
    tensors["lm_head.weight"][said] = (torch.linalg.pinv(states) @ logits).T
    return tensors


def _tiny_models() -> Any:
    spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parent / "tools" / "tiny_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
