"""Vectorised sampling of one token per row, reproducible by seed in any batch.

Every row is sampled by inverting its cumulative distribution at a uniform number. That number depends only on the row's
seed and its number of sampled tokens. It is a counter passed through the SplitMix64 mixer (Steele, Lea and Flood,
OOPSLA 2014). So a batch needs neither a generator per row nor an order of draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from afm.models.base import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Draw:
    """State of one row for the sampler.

    Attributes:
        params: How to sample.
        key: Start of the row's stream of uniform numbers, from :func:`stream_key`.
        position: Place of the next token in the text. An interrupted generation whose tokens come back as part of the
            prompt continues its stream.
    """

    params: SamplingParams
    key: int
    position: int


def stream_key(seed: int) -> int:
    """Return the start of the stream of uniform numbers of ``seed``. Adjacent seeds give unrelated streams."""
    word = seed & _WORD
    for _ in range(2):
        word = (word + _GOLDEN) & _WORD
        word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
        word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
        word ^= word >> 31
    return word


class BatchSampler:
    """Repeatedly samples one token for each of a fixed list of rows.

    Args:
        rows: One :class:`Draw` per row, in the order of the logits.
        device: Device of the logits.
    """

    def __init__(self, rows: Sequence[Draw], device: Any) -> None:
        import numpy as np
        import torch

        params = [row.params for row in rows]
        self._counters = np.array([row.position for row in rows], dtype=np.uint64)
        self._keys = np.array([row.key for row in rows], dtype=np.uint64)
        greedy = [item.temperature == 0 for item in params]
        self._all_greedy = all(greedy)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        temperatures = [item.temperature or 1.0 for item in params]
        self._temperature_BT = (
            torch.tensor(temperatures, device=device).unsqueeze(1)
            if any(value != 1 for value in temperatures)
            else None
        )
        filtered = [
            index
            for index, item in enumerate(params)
            if (item.top_k > 0 or item.top_p < 1) and item.temperature > 0
        ]
        self._filter = _Filter([params[index] for index in filtered], filtered, device) if filtered else None
        self._device = device

    def sample(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token per row.

        Args:
            logits_BV: float32.

        Returns:
            Ids and their log-probabilities (temperature applied, greedy rows at 1, before top-k and top-p),
            each of shape [B].
        """
        import torch

        if self._temperature_BT is not None:
            logits_BV = logits_BV / self._temperature_BT
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        if self._all_greedy:
            tokens_B = logits_BV.argmax(dim=-1)
        else:
            tokens_B = self._draw(logprobs_BV)
            if self._greedy_B is not None:
                tokens_B = torch.where(self._greedy_B, logits_BV.argmax(dim=-1), tokens_B)
        self._counters += 1
        return tokens_B, logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)

    def _draw(self, logprobs_BV: Tensor) -> Tensor:
        import torch

        probs_BV = logprobs_BV.exp()
        if self._filter is not None:
            probs_BV = self._filter.apply(probs_BV)
        # In float64 the last entry stays above every threshold, and rare tokens keep their share.
        cumulative_BV = probs_BV.cumsum(dim=-1, dtype=torch.float64)
        threshold_BT = cumulative_BV[:, -1:] * self._uniform_BT()
        tokens_B = torch.searchsorted(cumulative_BV, threshold_BT, right=True).squeeze(1)
        return tokens_B.clamp_(
            max=probs_BV.shape[1] - 1
        )  # NaN has no position; the caller sees its log-probability

    def _uniform_BT(self) -> Tensor:
        import numpy as np
        import torch

        words = self._keys + self._counters * np.uint64(_GOLDEN)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
        words ^= words >> np.uint64(31)
        uniform = (words >> np.uint64(12)).astype(np.float64) * 2.0**-52
        return torch.from_numpy(uniform).to(self._device).unsqueeze(1)


class _Filter:
    """Top-k, then top-p on the remaining tokens, for some rows of a batch."""

    def __init__(self, params: Sequence[SamplingParams], rows: Sequence[int], device: Any) -> None:
        import torch

        self._rows = torch.tensor(rows, device=device)
        self._top_p_BT = torch.tensor([item.top_p for item in params], device=device).unsqueeze(1)
        no_limit = torch.iinfo(torch.int64).max
        ks = [item.top_k or no_limit for item in params]
        self._top_k_BT = torch.tensor(ks, device=device).unsqueeze(1)
        self._widest = max(ks)

    def apply(self, probs_BV: Tensor) -> Tensor:
        """Set the probability of tokens outside the filters to 0, without renormalising."""
        import torch

        chosen_BV = probs_BV[self._rows]
        if self._widest < chosen_BV.shape[1]:
            sorted_BV, order_BV = chosen_BV.topk(self._widest, dim=-1)
        else:
            sorted_BV, order_BV = chosen_BV.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(sorted_BV.shape[1], device=sorted_BV.device)
        sorted_BV = sorted_BV.masked_fill(ranks >= self._top_k_BT, 0.0)
        share_BV = sorted_BV / sorted_BV.sum(dim=-1, keepdim=True)
        before_BV = share_BV.cumsum(dim=-1) - share_BV
        beyond_BV = before_BV >= self._top_p_BT
        kept_BV = torch.zeros_like(chosen_BV).scatter_(1, order_BV, sorted_BV.masked_fill(beyond_BV, 0.0))
        return probs_BV.index_copy(0, self._rows, kept_BV)
