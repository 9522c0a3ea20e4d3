"""Text from a model: one token after the other, drawn from the softmax at a temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.train.data import END_OF_DOCUMENT, NUM_BYTE_TOKENS
from moestro.train.errors import TrainError
from moestro.train.model import LanguageModel


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    last_token: int | None = None,
) -> list[int]:
    """New tokens after `prompt`. The whole context goes through the model for each one (there is no cache of keys);
    ends early at END_OF_DOCUMENT where tokens above it, given by `last_token`, are spare. temperature 0 takes the
    likeliest. Draws from its own generator, so that a run's random state stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    tokens, written = list(prompt), []
    for _ in range(num_tokens):
        context: Tensor = torch.tensor([tokens[-model.config.seq_len :]], device=device)
        logits = model(context)[0, -1].float().cpu()
        if last_token is not None:
            logits = logits[: last_token + 1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            logits = logits / temperature
            if 0 < top_k < len(logits):
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        if last_token is not None and token == END_OF_DOCUMENT:
            break
        tokens.append(token)
        written.append(token)
    return written


def generate_text(
    model: LanguageModel,
    unit: str,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """Prompt and continuation. Models of token files read and write token numbers, separated by spaces."""
    if unit == "byte":
        start = list(prompt.encode("utf-8")) or [END_OF_DOCUMENT]
        new = generate(model, start, num_tokens, temperature, top_k, seed, last_token=NUM_BYTE_TOKENS - 1)
        text = bytes(new).decode("utf-8", "replace")
        # A model that has learnt little writes control characters, which a terminal would obey.
        return prompt + "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    try:
        start = [int(word) for word in prompt.split()]
    except ValueError:
        raise TrainError(f"--prompt: this model reads token numbers, got '{prompt}'") from None
    if not start or not all(0 <= token < model.config.vocab_size for token in start):
        raise TrainError(
            f"--prompt: expected token numbers in 0..{model.config.vocab_size - 1}, got '{prompt}'"
        )
    return " ".join(map(str, start + generate(model, start, num_tokens, temperature, top_k, seed)))
