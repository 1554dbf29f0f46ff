"""Tiny models that recite texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def learn_by_heart(
    folder: Path, texts: Sequence[Sequence[tuple[str, bool]]], *, loss: float = 0.002, max_steps: int = 2000
) -> None:
    """Train the model in ``folder`` until it recites ``texts``, as a predictable agent for tests and benchmarks.

    Args:
        texts: Each as pieces: a text, and whether the model must say it. Pieces are encoded separately.
        loss: Mean cross-entropy of the recited text at which training stops.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [
        [
            (token, token if own else -100)
            for piece, own in text
            for token in tokenizer.encode(piece, add_special_tokens=False)
        ]
        for text in texts
    ]
    width = max(map(len, rows))
    ids, labels = torch.tensor([row + [(0, -100)] * (width - len(row)) for row in rows]).unbind(-1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(max_steps):
        current = network(input_ids=ids, labels=labels).loss
        if current.item() < loss:
            network.save_pretrained(folder)
            return
        current.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"not learned in {max_steps} steps: loss {current.item():.3g}")
