"""Opening a model: a folder is loaded into this process, an address is asked over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from afm.agents import adapter_base, lacks_model, model_folder
from afm.endpoints.chat import MOST_PARALLEL, EndpointSettings
from afm.endpoints.connections import address_fault, addresses
from afm.errors import ConfigError, EngineError, MissingExtraError, suggestion, without_password
from afm.models.base import FloatType, Generation, SamplingParams, TokenModel, ToolCalls
from afm.models.chat_only import ChatOnlyModel
from afm.models.engine import BatchEngine
from afm.models.openai import OpenAIModel, served_models
from afm.models.tokenizer import ChatTokenizer
from afm.terminal import plural

_EXPECTED = "expected a model's folder or an http(s) address; `afm import` makes a folder of a GGUF file"


def load_model(
    source: str | Path,
    *,
    name: str | None = None,
    threads: int | None = None,
    max_batch: int = 64,
    seed: int | None = 0,
    tokenizer: str | Path | None = None,
    context_tokens: int | None = None,
    device: str | None = None,
    dtype: FloatType | None = None,
    chat: ToolCalls | None = None,
    request: Mapping[str, Any] | None = None,
    tool_roles: Mapping[str, str] | None = None,
) -> TokenModel:
    """Open the model at ``source``.

    Args:
        source: Folder of a Hugging Face model or training run, or http(s) addresses of OpenAI-compatible servers that return
            token ids, with commas. ``AFM_MODEL_API_KEY`` holds the server's key.
        name: Name of the model in records. It selects one of several models of a server.
        threads: CPU threads, for a folder.
        max_batch: Generations at the same time.
        seed: Makes generations without a seed reproducible, for a folder.
        tokenizer: Folder of the served model's tokenizer. Required with an address.
        context_tokens: Maximum length of prompt and response together. The default is that of the model or server.
        device: ``cpu``, ``cuda`` and so on, for a folder. The default is a GPU if there is one.
        dtype: Data type of the weights, for a folder. The default is float32 on a CPU, bfloat16 on a GPU.
        chat: Use chat completions, with this form of tool calls. For servers that return no token ids.
        request: Changes to the fields of a chat request. ``None`` removes a field.
        tool_roles: Tag and description of each tool role, for native tool calls.

    Raises:
        ConfigError, EngineError: The folder holds no model, or the server cannot be asked or lacks a setting.
    """
    address = str(source)
    endpoint = EndpointSettings(max_parallel=min(max_batch, MOST_PARALLEL))  # further generations wait
    if chat is not None:
        if name is None:
            raise ConfigError(f"{address}: a chat endpoint needs the name of its model (name=...)")
        common: dict[str, Any] = {"context_tokens": context_tokens, "request": request, "endpoint": endpoint}
        return ChatOnlyModel(address, name=name, tool_roles=tool_roles, tool_calls=chat, **common)
    if address.startswith(("http://", "https://")):
        return _served(address, name, tokenizer, context_tokens, endpoint)
    if why := lacks_model(source):
        raise ConfigError(f"{source}: {why}; {_EXPECTED}")
    return TransformersModel(
        model_folder(source),
        name=name or address,
        threads=threads,
        max_batch=max_batch,
        device=device,
        dtype=dtype,
        seed=seed,
        context_tokens=context_tokens,
    )


def _served(
    url: str,
    name: str | None,
    tokenizer: str | Path | None,
    context_tokens: int | None,
    endpoint: EndpointSettings,
) -> TokenModel:
    if tokenizer is None:
        raise ConfigError(
            f"{url}: a served model needs the folder of its tokenizer; give it with "
            "`afm ask --tokenizer DIR`, or model.tokenizer=DIR for `afm eval`"
        )
    for address in addresses(url):
        if fault := address_fault(address):
            raise ConfigError(
                f"{without_password(address)}: expected {fault}; several addresses with commas between"
            )
    codec = ChatTokenizer.load(tokenizer)
    served = served_models(url)
    if name is None and len(served) == 1:
        name = next(iter(served))
    if name is None:
        raise ConfigError(
            f"{url} serves {plural(len(served), 'model')}; name one of: {', '.join(sorted(served))}"
        )
    if name not in served:
        raise ConfigError(f"{url} serves no model {name!r}; {suggestion(name, served)}")
    context = context_tokens or served[name]
    if context is None:
        raise EngineError(
            f"{url} does not report the context of {name!r}; give it with `afm ask --context-tokens N`, or "
            "model.context_tokens=N for `afm eval`"
        )
    model = OpenAIModel(url, codec, name=name, context_tokens=context, endpoint=endpoint)
    model.folder = Path(tokenizer)
    return model


class TransformersModel(TokenModel):
    """A model folder as a :class:`afm.models.base.TokenModel`. Many episodes share its batches.

    The folder of a LoRA adapter is loaded with its base model. The options are those of :func:`load_model`.

    Args:
        path: Folder with the model and its tokenizer.

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
        dtype: FloatType | None = None,
        seed: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        try:
            import torch
        except ImportError:
            raise MissingExtraError("torch", "sft") from None
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if threads is not None:
            torch.set_num_threads(threads)
        tokenizer = ChatTokenizer.load(path)
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        model = _load_model(Path(path), getattr(torch, dtype))
        rows = model.get_input_embeddings().weight.shape[0]
        if tokenizer.size > rows:
            raise ConfigError(
                f"{path}: the tokenizer has {tokenizer.size} tokens, the model {rows}; "
                "they do not belong together"
            )
        longest = int(model.config.max_position_embeddings)
        if context_tokens and context_tokens > longest:
            raise ConfigError(f"{path}: context_tokens is {context_tokens}; expected at most {longest}")
        super().__init__(tokenizer, name=name or str(path), context_tokens=context_tokens or longest)
        self.folder = Path(path)
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
        """Continue ``prompt_ids``. A limit above the model's context is lowered to it.

        Raises:
            EngineError: The prompt fills the context, or the model failed.
        """
        return await self._engine.generate(prompt_ids, self._fitting(prompt_ids, params))

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_token: Callable[[int], None]
    ) -> Generation:
        """Do the same as :meth:`generate`, and report every token when it is sampled."""
        params = self._fitting(prompt_ids, params)
        return await self._engine.generate(prompt_ids, params, on_token=on_token)

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """See :meth:`afm.models.base.TokenModel.score`."""
        if len(token_ids) > self.context_tokens:
            raise EngineError(
                f"{len(token_ids)} tokens to score, the model's context is {self.context_tokens}"
            )
        return await self._engine.score(token_ids)

    async def close(self) -> None:
        """Stop the engine's thread and free its memory."""
        await self._engine.close()

    def _fitting(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        left = self.context_tokens - len(prompt_ids)
        if left < 1:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens, the model's context {self.context_tokens}"
            )
        return params if params.max_new_tokens <= left else replace(params, max_new_tokens=left)


def _load_model(path: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    base = adapter_base(path)
    try:
        with silent_progress():
            model = AutoModelForCausalLM.from_pretrained(
                base or str(path), dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
            return model if base is None else _with_adapter(model, path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no model can be loaded from it: {error}") from error


def _with_adapter(model: Any, folder: Path) -> Any:
    """Return the model with its LoRA adapter merged, which is as fast as without an adapter."""
    try:
        from peft import PeftModel
    except ImportError:
        raise MissingExtraError("peft", "sft") from None
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


@contextmanager
def silent_progress() -> Iterator[None]:
    """Hide the progress bars of transformers while the block runs."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
