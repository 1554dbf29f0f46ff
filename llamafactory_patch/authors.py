"""A template and a tokenizer that remember who wrote each token.

A token the environment wrote travels through LLaMA-Factory as the bitwise complement of its id. That is a
negative integer, so it survives every list operation on the way to the labels (cut-off, history masking,
reversal, packing) and no mask has to be carried beside it. :func:`ids_and_labels` turns it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from afm.errors import ConfigError, DataError
from afm.masking import Boundary, encode_batch
from afm.trajectory import Author, Segment
from llamafactory_patch.spans import segments_by_tag

CHARS_PER_CALL = 1_000_000
"""Bounds the memory of one tokenizer call: an encoding holds far more than the ids that are kept of it."""

_FENCE_OPEN, _FENCE_CLOSE = "\ue000", "\ue001"


def ids_and_labels(
    input_ids: Sequence[int], labels: Sequence[int], ignore_index: int
) -> tuple[list[int], list[int]]:
    """Turn complemented ids back; their labels become ``ignore_index`` (negative itself)."""
    ids = [token if token >= 0 else ~token for token in input_ids]
    return ids, [label if label >= 0 else ignore_index for label in labels]


class AuthorTokenizer:
    """What a template encodes with: cuts a text at its fences and complements the environment's ids.

    While ``collecting``, ``encode`` only takes note of what it is asked; :meth:`encode_collected` then encodes
    all of it in few calls of the real tokenizer, which is several times faster than text by text.
    """

    def __init__(self, tokenizer: Any, boundary: Boundary, roles_without_loss: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._boundary = boundary
        self._silent = tuple(roles_without_loss)
        self._wanted: dict[tuple[str, ...], None] = {}
        self._encoded: dict[tuple[str, ...], list[int]] = {}
        self.collecting = False
        self.fence = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False, **options: Any) -> list[int]:
        """Ids of ``text``; between fences the agent and the environment take turns, the agent first."""
        if add_special_tokens or options:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options))
        pieces = tuple(text.split(self.fence)) if self.fence else (text,)
        if self.collecting:
            self._wanted[pieces] = None
            return []
        if pieces not in self._encoded:
            self._encode([pieces])
        return list(self._encoded[pieces])

    def encode_collected(self) -> None:
        """Encode what was collected, and collect no longer."""
        self.collecting = False
        for rows in _in_parts(self._wanted):
            self._encode(rows)
        self._wanted = {}

    def _encode(self, rows: Sequence[tuple[str, ...]]) -> None:
        segments = [
            [Segment(author, text) for author, text in zip(cycle((Author.AGENT, Author.ENVIRONMENT)), row)]
            for row in rows
        ]
        encoded = encode_batch(self._tokenizer, segments, self._boundary, roles_without_loss=self._silent)
        for row, masked in zip(rows, encoded, strict=True):
            pairs = zip(masked.ids, masked.mask, strict=True)
            self._encoded[row] = [token if kept else ~token for token, kept in pairs]


class TurnTemplate:
    """A LLaMA-Factory template under which a turn whose message says ``loss: False`` has complemented ids.

    It hands every question on to ``template``.
    """

    def __init__(self, template: Any) -> None:
        self._template = template

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_template":
            raise AttributeError(name)
        return getattr(self._template, name)

    def encode_multiturn(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> list[tuple[list[int], list[int]]]:
        """Pairs of prompt and response ids, like the template's own."""
        encoder, prepared = self._prepared(tokenizer, messages)
        pairs = self._template.encode_multiturn(encoder, prepared, *args, **kwargs)
        return [
            (source, self._target(tokenizer, target, message))
            for (source, target), message in zip(pairs, messages[1::2], strict=True)
        ]

    def encode_oneturn(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Ids of everything before the last turn, and of the last turn, like the template's own."""
        encoder, prepared = self._prepared(tokenizer, messages)
        source, target = self._template.encode_oneturn(encoder, prepared, *args, **kwargs)
        return source, self._target(tokenizer, target, messages[-1])

    def _prepared(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        """What encodes, and the messages it is to encode."""
        return tokenizer, messages

    def _target(self, tokenizer: Any, target: list[int], message: Mapping[str, Any]) -> list[int]:
        if message.get("loss", True):
            return target
        return [token if token < 0 else ~token for token in target]


class AuthorTemplate(TurnTemplate):
    """Assistant turns carry the environment's ids complemented, too.

    Only assistant turns are searched for observations: a prompt may explain the tag, and rollouts encode prompts
    in one piece. Template text behind the end-of-turn token is nobody's, so it is complemented as well.
    """

    def __init__(
        self, template: Any, tags: Sequence[str], boundary: Boundary, roles_without_loss: Sequence[str] = ()
    ) -> None:
        super().__init__(template)
        self._tags = tuple(tags)
        self._boundary = boundary
        self._silent = tuple(roles_without_loss)
        self._tokenizer: AuthorTokenizer | None = None

    def collect(self, tokenizer: Any) -> AuthorTokenizer:
        """Begin to collect; the tokenizer returned is used until :meth:`forget`."""
        self._tokenizer = AuthorTokenizer(tokenizer, self._boundary, self._silent)
        self._tokenizer.collecting = True
        return self._tokenizer

    def forget(self) -> None:
        """Drop what was collected and encoded."""
        self._tokenizer = None

    def _prepared(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[AuthorTokenizer, list[Mapping[str, Any]]]:
        author_tokenizer = self._tokenizer or AuthorTokenizer(tokenizer, self._boundary, self._silent)
        author_tokenizer.fence = fence = _unused_fence(messages)
        fenced = [
            {**message, "content": self._fenced(message["content"], fence)}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
        return author_tokenizer, fenced

    def _target(self, tokenizer: Any, target: list[int], message: Mapping[str, Any]) -> list[int]:
        return _until_end_of_turn(tokenizer, super()._target(tokenizer, target, message))

    def _fenced(self, content: str, fence: str) -> str:
        segments = segments_by_tag(content, self._tags)
        begins = fence if segments and segments[0].author is Author.ENVIRONMENT else ""
        ends = fence if segments and segments[-1].author is Author.ENVIRONMENT else ""
        return begins + fence.join(segment.text for segment in segments) + ends


def check_chat_template(template: Any, tokenizer: Any) -> None:
    """Refuse a template that renders a question otherwise than the tokenizer's own chat template.

    Raises:
        ConfigError: They differ: the trained model would be asked in a form it never saw.
    """
    question = [{"role": "user", "content": "How many?"}]
    prompt, _ = template.encode_oneturn(tokenizer, [*question, {"role": "assistant", "content": "3"}])
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    if prompt != tokenizer.encode(asked, add_special_tokens=False):
        raise ConfigError(
            f"`template` renders a question as {tokenizer.decode(prompt)!r}, the tokenizer's chat template, which "
            f"rollouts use, as {asked!r}; choose the template (and default_system) that fit the model, or "
            "set match_chat_template=false"
        )


@contextmanager
def rendering() -> Iterator[None]:
    """Turn into a fault of the row what its template cannot write: calls and tools of a form it does not know.

    Raises:
        DataError: In place of what the template raised.
    """
    try:
        yield
    except DataError:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"the chat template cannot write it: {type(error).__name__}: {error}") from error


def _unused_fence(messages: Iterable[Mapping[str, Any]]) -> str:
    """A text that occurs in no message; it cannot overlap itself, so a split at it is unambiguous."""
    number = 0
    texts = [message["content"] for message in messages]
    while any(f"{_FENCE_OPEN}{number}{_FENCE_CLOSE}" in text for text in texts):
        number += 1
    return f"{_FENCE_OPEN}{number}{_FENCE_CLOSE}"


def _until_end_of_turn(tokenizer: Any, target: list[int]) -> list[int]:
    """Complement the blank template text behind the last end token."""
    end = tokenizer.eos_token_id
    for position in range(len(target) - 1, -1, -1):
        if target[position] == end:
            return target[: position + 1] + [~token for token in target[position + 1 :]]
        if target[position] < 0 or tokenizer.decode([target[position]]).strip():
            break
    return target


def _in_parts(rows: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    part: list[tuple[str, ...]] = []
    chars = 0
    for row in rows:
        part.append(row)
        chars += sum(map(len, row))
        if chars >= CHARS_PER_CALL:
            yield part
            part, chars = [], 0
    if part:
        yield part
