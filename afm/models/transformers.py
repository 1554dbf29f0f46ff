"""A model in this process, by transformers and our engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, EngineError, MissingExtraError
from afm.models.base import Generation, SamplingParams
from afm.models.codec import CodecModel
from afm.models.engine import BatchEngine
from afm.models.tokenizer import ChatTokenizer


class TransformersModel(CodecModel):
    """A model folder as a :class:`afm.models.base.TokenModel`; many episodes share its batches.

    float32 on a CPU, bfloat16 on a GPU.

    Args:
        path: Folder with the model and its tokenizer.
        name: Identifies the model in records; default: the folder's path.
        threads: CPU threads; ``None`` leaves torch's setting.
        max_batch: Generations computed together.
        device: ``cpu``, ``cuda``, ``cuda:1`` ...; default: a GPU if there is one.
        seed: Makes generations without a seed of their own reproducible.

    Raises:
        ConfigError: The folder holds no usable model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        threads: int | None = None,
        max_batch: int = 64,
        device: str | None = None,
        seed: int | None = None,
    ) -> None:
        try:
            import torch
        except ImportError:
            raise MissingExtraError("torch", "sft") from None
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if threads is not None:
            torch.set_num_threads(threads)
        tokenizer = ChatTokenizer.load(path)
        model = _load_model(Path(path), torch.float32 if device == "cpu" else torch.bfloat16)
        rows = model.get_input_embeddings().weight.shape[0]
        if tokenizer.size > rows:
            raise ConfigError(
                f"{path}: the tokenizer has {tokenizer.size} tokens, the model {rows}; "
                "they do not belong together"
            )
        super().__init__(
            tokenizer, name=name or str(path), context_tokens=int(model.config.max_position_embeddings)
        )
        self._engine = BatchEngine(
            model,
            eos_ids=tokenizer.end_ids,
            pad_id=tokenizer.pad_id,
            decode=tokenizer.decode,
            vocabulary_size=rows,
            max_batch=max_batch,
            device=device,
            threads=threads,
            seed=seed,
        )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continue ``prompt_ids``; a limit that exceeds the model's context is lowered to it.

        Raises:
            EngineError: The prompt fills the context, or the model failed.
        """
        return await self._engine.generate(prompt_ids, self._fitting(prompt_ids, params))

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_token: Callable[[int], None]
    ) -> Generation:
        """As :meth:`generate`, with every token reported as it is sampled."""
        params = self._fitting(prompt_ids, params)
        return await self._engine.generate(prompt_ids, params, on_token=on_token)

    async def close(self) -> None:
        """Stop the engine's thread and free its memory."""
        await self._engine.close()

    def _fitting(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        left = self._context_tokens - len(prompt_ids)
        if left < 1:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens, the model's context {self._context_tokens}"
            )
        return params if params.max_new_tokens <= left else replace(params, max_new_tokens=left)


def _load_model(path: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no model can be loaded from it: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
