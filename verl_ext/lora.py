"""LoRA adapters (Hu et al., arXiv 2106.09685): the names of their tensors, and merging them into their matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from afm.errors import EngineError

_WRAPPED = "base_model.model."
"""The prefix that peft adds to the name of each parameter."""


def served_name(name: str) -> tuple[str, bool]:
    """Return the name under which verl sends a parameter, and whether it belongs to an adapter and so keeps peft's name."""
    if ".lora_" in name:
        return name.replace(".default.", "."), True
    return name.removeprefix(_WRAPPED).replace(".base_layer", ""), False


def matrix_of(name: str) -> str:
    """Return the name of the weight to which a part of an adapter belongs."""
    return f"{name.removeprefix(_WRAPPED).rpartition('.lora_')[0]}.weight"


def parts_of_matrix(matrix: str) -> tuple[str, str]:
    """Return the names of the two parts of a weight's adapter: the projection down to its rank, and the one up."""
    module = f"{_WRAPPED}{matrix.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


SCALE_KEYS = ("r", "lora_alpha", "use_rslora", "use_dora", "bias", "rank_pattern", "alpha_pattern")
"""The settings of peft that :func:`scale_of` reads."""


def scale_of(config: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's product, from peft's configuration.

    Raises:
        EngineError: The adapter is not plain LoRA, or its matrices have different ranks or factors.
    """
    if config.get("use_dora") or config.get("bias", "none") not in (None, "none"):
        raise EngineError(f"expected LoRA without DoRA and without biases, got {dict(config)}")
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise EngineError(f"expected LoRA with one rank and one alpha for all matrices, got {dict(config)}")
    rank: int = config["r"]
    return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def with_adapter(matrix: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a weight with its adapter merged in (section 4.1). The product is computed in float32."""
    return matrix + (up.float() @ down.float() * scale).to(matrix.dtype)


class MergedAdapter:
    """A LoRA adapter merged into the matrices of an engine, with a copy of the original matrices.

    Args:
        weights: The weights of the engine without an adapter.
        tensors: The first adapter, by peft's names. Later adapters must belong to the same matrices.

    Raises:
        EngineError: The engine has no such matrix.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        matrices = {name: matrix_of(name) for name in tensors if ".lora_A." in name}
        if unknown := [name for name, matrix in matrices.items() if matrix not in weights]:
            raise EngineError(f"the adapter changes a matrix that the model does not have: {unknown[0]}")
        self._without = {matrix: weights[matrix].clone() for matrix in matrices.values()}
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._scale = 0.0

    def replace(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Replace the adapter and return the matrices with the new one merged in (Hu et al., arXiv 2106.09685, section 4.1).

        Raises:
            EngineError: The adapter is not plain LoRA, or belongs to other matrices.
        """
        self._scale = scale_of(config)
        if {matrix_of(name) for name in tensors} != set(self._without):
            raise EngineError(f"the adapter's matrices differ from the previous ones: {sorted(tensors)[:3]}")
        self._tensors = tensors
        return {matrix: self._merged(matrix) for matrix in self._without}

    def parts_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the original matrices, and the parts of the adapter that are merged into ``weights``."""
        holds = {matrix: torch.equal(weights[matrix], self._merged(matrix)) for matrix in self._without}
        held = {name: tensor for name, tensor in self._tensors.items() if holds[matrix_of(name)]}
        return self._without | held

    def _merged(self, matrix: str) -> torch.Tensor:
        down, up = (self._tensors[name] for name in parts_of_matrix(matrix))
        return with_adapter(self._without[matrix], down, up, self._scale)
