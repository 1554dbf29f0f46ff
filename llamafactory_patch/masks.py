"""Decide by author which tokens of a text are trained on.

Only tag names separate the authors, because users of stock LLaMA-Factory declare no agent. For a valid trajectory, the
result equals that of :func:`afm.trajectory.author_segments`, which a test checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain, cycle
from typing import Any

from afm.choices import Boundary
from afm.errors import ConfigError, DataError, Fault, TrajectoryError
from afm.masking import encode_batch, role_spans
from afm.trajectory import Author, Segment
from afm.trajectory.tags import segments_around

IGNORE_INDEX = -100
"""The label of a token without loss (LLaMA-Factory 0.9.5, extras/constants.py)."""

MASKING_REVISION = 3
"""Increases with every change of the masking; data sets cached or stored by another revision are not reused."""

Text = tuple[str, ...]
"""Parts of a text, alternately by the agent and by the environment, the agent first."""

CHARS_PER_CALL = 1_000_000
"""Characters per tokenizer call; bounds its memory, because an encoding is much larger than its ids."""

_FENCE_OPEN, _FENCE_CLOSE = "\ue000", "\ue001"


def segments_by_tag(text: str, tags: Sequence[str]) -> tuple[Segment, ...]:
    """Split ``text`` by author. The environment wrote each ``<tag>...</tag>`` and the white space around it.

    Segments alternate between the authors, are not empty, and join to ``text``.

    Raises:
        TrajectoryError: A tag is opened twice, closed without being open, never closed, or has another form
            (``<Observation>``, ``</observation >``, ``<observation id="1">``). Any mask would then be a guess.
    """
    return tuple(segments_around(text, _spans(text, tuple(tags))))


def unseen_roles(rows: Iterable[Mapping[str, Any]], roles: Sequence[str]) -> list[str]:
    """Return the ``roles`` that occur in no assistant turn outside of other roles; stop reading when all have occurred."""
    unseen = list(roles)
    for row in rows if unseen else ():
        turns = (*row["_prompt"], *row["_response"])
        texts = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        unseen = [role for role in unseen if not any(next(role_spans(text, [role]), None) for text in texts)]
        if not unseen:
            break
    return unseen


def refuse_unseen(roles: Sequence[str]) -> None:
    """Refuse roles that no row has; they are probably misspelled.

    Raises:
        ConfigError: ``roles`` is not empty.
    """
    if roles:
        raise ConfigError(
            f"roles_without_loss: no row has {' or '.join(f'<{role}>' for role in roles)} outside of other "
            "roles; expected roles that occur in the rows"
        )


class TextEncoder:
    """Encodes texts of two authors in batches, which is several times faster than one tokenizer call per text."""

    def __init__(self, tokenizer: Any, boundary: Boundary, roles_without_loss: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._boundary = boundary
        self._silent = tuple(roles_without_loss)
        self._encoded: dict[Text, tuple[list[int], list[int]]] = {}

    def learn(self, texts: Iterable[Text]) -> None:
        """Encode the texts that are not encoded yet."""
        for rows in _in_parts(text for text in dict.fromkeys(texts) if text not in self._encoded):
            segments = [
                [
                    Segment(author, part)
                    for author, part in zip(cycle((Author.AGENT, Author.ENVIRONMENT)), row)
                ]
                for row in rows
            ]
            encoded = encode_batch(self._tokenizer, segments, self._boundary, roles_without_loss=self._silent)
            self._encoded |= {
                row: (masked.ids, masked.mask) for row, masked in zip(rows, encoded, strict=True)
            }

    def forget(self) -> None:
        """Drop all encoded texts."""
        self._encoded = {}

    def ids_and_mask(self, draft: Sequence[int | Text]) -> tuple[list[int], list[int]]:
        """Return the token ids of a draft, and a mask of the same length with 0 for the environment's tokens."""
        self.learn(part for part in draft if isinstance(part, tuple))
        parts = [self._encoded[part] if isinstance(part, tuple) else ([part], [1]) for part in draft]
        ids, masks = ([part[side] for part in parts] for side in (0, 1))
        return list(chain.from_iterable(ids)), list(chain.from_iterable(masks))


class DraftTokenizer:
    """Replaces the tokenizer while a template assembles a conversation; keeps texts as texts, split at the fences."""

    def __init__(self, tokenizer: Any, fence: str) -> None:
        self._tokenizer = tokenizer
        self._fence = fence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[Text]:
        """Return the text itself in place of its ids."""
        assert not add_special_tokens
        return [tuple(text.split(self._fence))]


class MaskedTemplate:
    """A LLaMA-Factory template that returns turns as token ids or, while ``labelling``, as labels of the same length.

    A turn whose message has ``loss: False`` has no labels. With ``tags``, the text between them in the assistant's turns
    has no labels either, nor has blank template text after the end of a turn. Prompts may explain the tags, so they are
    not searched, and rollouts encode them in one piece.
    """

    def __init__(
        self,
        template: Any,
        tags: Sequence[str] = (),
        boundary: Boundary = Boundary.SPLIT,
        roles_without_loss: Sequence[str] = (),
    ) -> None:
        self._template = template
        self._tags = tuple(tags)
        self._boundary = boundary
        self._silent = tuple(roles_without_loss)
        self._encoder: TextEncoder | None = None
        self.labelling = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_template":
            raise AttributeError(name)
        return getattr(self._template, name)

    def collect(self, conversations: Iterable[Mapping[str, Any]], tokenizer: Any) -> None:
        """Encode the texts of conversations (``messages``, ``system``, ``tools``, template options) in advance.

        They are kept until :meth:`forget`.
        """
        if not self._tags:
            return
        texts: dict[Text, None] = {}
        for conversation in conversations:
            with suppress(DataError), rendering():  # the error is reported when the row itself is encoded
                drafts = self._template.encode_multiturn(**self._draft(tokenizer, **conversation))
                parts = chain.from_iterable(chain.from_iterable(drafts))
                texts |= dict.fromkeys(part for part in parts if isinstance(part, tuple))
        self._encoder = self._new_encoder(tokenizer)
        self._encoder.learn(texts)

    def forget(self) -> None:
        """Drop the texts that were encoded in advance."""
        self._encoder = None

    def encode_multiturn(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> list[tuple[list[int], list[int]]]:
        """Return pairs of a prompt and a response, like the template's method."""
        draft = self._draft(tokenizer, messages)
        pairs = self._template.encode_multiturn(draft["tokenizer"], draft["messages"], *args, **kwargs)
        return [
            self._turn(tokenizer, source, target, message)
            for (source, target), message in zip(pairs, messages[1::2], strict=True)
        ]

    def encode_oneturn(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Return everything before the last turn, and the last turn, like the template's method."""
        draft = self._draft(tokenizer, messages)
        source, target = self._template.encode_oneturn(draft["tokenizer"], draft["messages"], *args, **kwargs)
        return self._turn(tokenizer, source, target, messages[-1])

    def _draft(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **other: Any) -> dict[str, Any]:
        """Return the arguments for the template; with tags, fences separate the authors in the assistant's turns."""
        if not self._tags:
            return {"tokenizer": tokenizer, "messages": messages, **other}
        fence = _unused_fence(messages)
        fenced = [
            {**message, "content": self._fenced(message["content"], fence)}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
        return {"tokenizer": DraftTokenizer(tokenizer, fence), "messages": fenced, **other}

    def _turn(
        self, tokenizer: Any, source: list[Any], target: list[Any], message: Mapping[str, Any]
    ) -> tuple[list[int], list[int]]:
        ids, mask = target, [1] * len(target)
        if self._tags:
            encoder = self._encoder or self._new_encoder(tokenizer)
            source, _ = encoder.ids_and_mask(source)
            ids, mask = encoder.ids_and_mask(target)
            _mask_behind_end(tokenizer, ids, mask)
        if not self.labelling:
            return source, ids
        mask = mask if message.get("loss", True) else [0] * len(ids)
        return source, [token if kept else IGNORE_INDEX for token, kept in zip(ids, mask, strict=True)]

    def _new_encoder(self, tokenizer: Any) -> TextEncoder:
        return TextEncoder(tokenizer, self._boundary, self._silent)

    def _fenced(self, content: str, fence: str) -> str:
        segments = segments_by_tag(content, self._tags)
        begins = fence if segments and segments[0].author is Author.ENVIRONMENT else ""
        ends = fence if segments and segments[-1].author is Author.ENVIRONMENT else ""
        return begins + fence.join(segment.text for segment in segments) + ends


def _mask_behind_end(tokenizer: Any, ids: list[int], mask: list[int]) -> None:
    """Mask the blank template text after the last end token."""
    for position in range(len(ids) - 1, -1, -1):
        if not mask[position]:
            return
        if ids[position] == tokenizer.eos_token_id:
            mask[position + 1 :] = [0] * (len(ids) - position - 1)
            return
        if tokenizer.decode([ids[position]]).strip():
            return


def _unused_fence(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return a text that occurs in no message. It cannot overlap itself, so splitting at it is unambiguous."""
    number = 0
    texts = [message["content"] for message in messages]
    while any(f"{_FENCE_OPEN}{number}{_FENCE_CLOSE}" in text for text in texts):
        number += 1
    return f"{_FENCE_OPEN}{number}{_FENCE_CLOSE}"


def _in_parts(texts: Iterable[Text]) -> Iterator[list[Text]]:
    part: list[Text] = []
    chars = 0
    for text in texts:
        part.append(text)
        chars += sum(map(len, text))
        if chars >= CHARS_PER_CALL:
            yield part
            part, chars = [], 0
    if part:
        yield part


def check_chat_template(template: Any, tokenizer: Any) -> None:
    """Refuse a template that renders a question differently from the tokenizer's own chat template.

    Raises:
        ConfigError: They differ, so rollouts would use a form that the model was not trained on.
    """
    question = [{"role": "user", "content": "How many?"}]
    prompt, _ = template.encode_oneturn(tokenizer, [*question, {"role": "assistant", "content": "3"}])
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    if prompt != tokenizer.encode(asked, add_special_tokens=False):
        raise ConfigError(
            f"`template` renders a question as {tokenizer.decode(prompt)!r}, but the tokenizer's chat template, which "
            f"rollouts use, as {asked!r}; choose the template (and default_system) of the model, or "
            "set match_chat_template=false"
        )


@contextmanager
def rendering() -> Iterator[None]:
    """Turn errors of the template into an error of the row, such as calls and tools in an unknown form.

    Raises:
        DataError: Replaces the error of the template.
    """
    try:
        yield
    except DataError:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"the chat template cannot write it: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=16)
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(re.escape(tag) for tag in tags)
    attributes = r"\s+[\w:.-]+\s*=[^<>]*"
    return re.compile(rf"<\s*(/?)\s*({names})(?:\s*/?\s*|{attributes})>", re.IGNORECASE | re.ASCII)


def _spans(text: str, tags: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the begin and end of each observation."""
    spans: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for tag in _tag_pattern(tags).finditer(text):
        closes = tag[1] == "/"
        is_exact = tag[2] in tags and tag[0] == f"<{tag[1]}{tag[2]}>"
        if opened is None:
            if not is_exact:
                name = next(name for name in tags if name.lower() == tag[2].lower())
                message = f"{tag[0]} at character {tag.start()}: expected <{tag[1]}{name}>"
                raise _fault(Fault.UNKNOWN_ROLE, message, tag)
            if closes:
                raise _fault(Fault.STRAY_CLOSE, f"{tag[0]} at character {tag.start()} closes nothing", tag)
            opened = tag
        elif is_exact and tag[2] == opened[2]:
            if not closes:
                message = f"{tag[0]} opened at character {opened.start()} is opened again"
                raise _fault(Fault.NESTED, f"{message} at character {tag.start()} before it is closed", tag)
            spans.append((opened.start(), tag.end()))
            opened = None
    if opened is not None:
        message = f"{opened[0]} opened at character {opened.start()} is never closed"
        raise _fault(Fault.UNCLOSED, message, opened)
    return spans


def _fault(kind: Fault, message: str, tag: re.Match[str]) -> TrajectoryError:
    return TrajectoryError(message, kind=kind, character=tag.start())
