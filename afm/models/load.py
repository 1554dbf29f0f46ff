"""One way to every model: a folder is loaded into this process, an address is asked over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.agents import model_folder
from afm.errors import ConfigError, EngineError, suggestion
from afm.models.base import TokenModel
from afm.models.tool_calls import ToolCalls
from afm.settings import load_settings

if TYPE_CHECKING:
    from afm.models.openai import ServedModel


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
    chat: ToolCalls | None = None,
    request: Mapping[str, Any] | None = None,
    tool_roles: Mapping[str, str] | None = None,
) -> TokenModel:
    """The model at ``source``.

    Args:
        source: Folder of a Hugging Face model or of a training run that left one, or the http(s) address of an OpenAI-compatible server that
            returns token ids; of several that serve one model, with commas between. The server's key is read from ``AFM_MODEL_API_KEY``.
        name: Of the model in records, and on a server of several models which one.
        threads: CPU threads, for a folder.
        max_batch: Generations at the same time.
        seed: Makes generations without a seed of their own reproducible, for a folder.
        tokenizer: Folder of the served model's tokenizer; required with an address.
        context_tokens: Bound on prompt and response together, for a server that does not tell.
        device: ``cpu``, ``cuda`` ..., for a folder; default: a GPU if there is one.
        chat: Ask the server by chat completions, and how it calls tools; for servers that return no token ids.
        request: Changes to the fields of a chat request; ``None`` removes one.
        tool_roles: Tag and description of each tool role, for native tool calls.

    Raises:
        ConfigError: The folder holds no model, or something is missing for a server.
        EngineError: The server cannot be asked.
    """
    address = str(source)
    if chat is not None:
        return _chat_only(address, name, max_batch, context_tokens, chat, request, tool_roles)
    if address.startswith(("http://", "https://")):
        return _served(address, name, max_batch, tokenizer, context_tokens)
    if not Path(source).is_dir():
        raise ConfigError(f"{source}: no such folder; expected a model's folder or an http(s) address")
    from afm.models.transformers import TransformersModel

    return TransformersModel(
        model_folder(source),
        name=name or address,
        threads=threads,
        max_batch=max_batch,
        device=device,
        seed=seed,
    )


def _chat_only(
    url: str,
    name: str | None,
    max_parallel: int,
    context_tokens: int | None,
    chat: ToolCalls,
    request: Mapping[str, Any] | None,
    tool_roles: Mapping[str, str] | None,
) -> TokenModel:
    from afm.models.chat_only import ChatOnlyModel

    if name is None:
        raise ConfigError(f"{url}: a chat endpoint needs the name of its model (name=...)")
    return ChatOnlyModel(
        url,
        name=name,
        tool_roles=tool_roles,
        tool_calls=chat,
        context_tokens=context_tokens,
        request=request,
        api_key=_api_key(),
        max_parallel=max_parallel,
    )


def _api_key() -> str | None:
    secret = load_settings().afm_model_api_key
    return secret.get_secret_value() or None if secret is not None else None


def _served(
    url: str,
    name: str | None,
    max_parallel: int,
    tokenizer: str | Path | None,
    context_tokens: int | None,
) -> TokenModel:
    from afm.models.openai import OpenAIModel
    from afm.models.replicas import addresses
    from afm.models.tokenizer import ChatTokenizer

    if tokenizer is None:
        raise ConfigError(
            f"{url}: a model behind an address needs the folder of its tokenizer (tokenizer=...)"
        )
    if wrong := [one for one in addresses(url) if not one.startswith(("http://", "https://"))]:
        raise ConfigError(f"{wrong[0]}: no address; expected http://HOST:PORT, several with commas between")
    codec = ChatTokenizer.load(tokenizer)
    api_key = _api_key()
    served = served_by_all(addresses(url), api_key)
    if name is None and len(served) == 1:
        name = next(iter(served))
    if name is None:
        raise ConfigError(f"{url} serves {len(served)} models, name one of: {', '.join(sorted(served))}")
    if name not in served:
        raise ConfigError(f"{url} serves no model {name!r}; {suggestion(name, served)}")
    context = context_tokens or served[name].context_tokens
    if context is None:
        raise EngineError(f"{url} does not tell the context of {name!r}; give context_tokens=...")
    return OpenAIModel(
        url, codec, name=name, context_tokens=context, api_key=api_key, max_parallel=max_parallel
    )


def served_by_all(urls: tuple[str, ...], api_key: str | None) -> dict[str, ServedModel]:
    """The models that every server lists, each with the smallest context that one of them tells.

    Raises:
        EngineError: A server cannot be asked, or they have no model in common.
    """
    from afm.models.openai import ServedModel, served_models

    lists = [{model.name: model for model in served_models(url, api_key)} for url in urls]
    common = [name for name in lists[0] if all(name in others for others in lists)]
    if lists[0] and not common:
        told = "; ".join(f"{url} serves {', '.join(names)}" for url, names in zip(urls, lists, strict=True))
        raise EngineError(f"the servers have no model in common: {told}")
    contexts = {name: [found for one in lists if (found := one[name].context_tokens)] for name in common}
    return {name: ServedModel(name, min(contexts[name], default=None)) for name in common}
