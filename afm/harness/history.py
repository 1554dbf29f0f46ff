"""Store the conversations of a session as a tree of sampled turns, and read its trajectories."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from afm.harness.rendering import ChatRenderer
from afm.harness.requests import ModelChoice, ModelRequest, RequestRefusedError, canonical_message
from afm.models.base import FinishReason, Generation

_LONGEST_END = 64
"""Characters that contain every end token's text."""


class Branch(StrEnum):
    """Reasons why a trajectory of an episode begins."""

    FIRST = "first"
    """The first trajectory of the episode."""
    NEW = "new"
    """Another conversation, for example of a second agent. It shares no message except the system message."""
    FORK = "fork"
    """A second continuation of the same sampled prefix, or a second reply to the same prompt (``n``, a retry)."""
    TOOLS = "tools"
    """The same history with other tools."""
    TRIMMED = "trimmed"
    """Messages of the history are missing."""
    REORDERED = "reordered"
    """Messages of the history are in another order."""
    EDITED = "edited"
    """The history has new words: a summary, or a changed message."""
    TEMPLATE = "template"
    """The chat template cannot render the new messages separately."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """Position of a sampled turn in a trajectory: ``response_ids[begin:end]``.

    Attributes:
        call: Number of its request in the session, from 0.
        trained: Whether its mask is 1 here. A turn that several trajectories share is trained in the first of them.
        tool_calls: Number of tool calls that the engine's parser found in it.
    """

    begin: int
    end: int
    call: int
    finish: FinishReason
    trained: bool
    tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """One trajectory of an episode: a token sequence that the model read and continued.

    Attributes:
        name: Number of the trajectory as text, from ``0``, in the order of the paths. Forks of a path follow it, the
            oldest first.
        reason: Why it begins.
        parent: Name of the trajectory whose first turns it shares. Empty if it shares none.
        prompt_ids: Tokens before the first sampled token.
        response_ids: Sampled tokens, and the encoded tokens between them.
        response_mask: 1 for a sampled token that is trained here, else 0.
        logprobs: Log-probability of each sampled token, else 0.0. Empty if the engine reports none.
        turns: The sampled turns, in order.
        messages: The chat with its replies. For completions, ``prompt`` and ``completion`` of the last request.
        tools: Tools that the chat offered.
        member: Team member to which the conversation belongs.
    """

    name: str
    reason: Branch
    parent: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    turns: tuple[SampledTurn, ...]
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    member: str = ""


@dataclass(eq=False, slots=True)
class Turn:
    """A sampled turn in the tree of a session, with the ids that were encoded before it."""

    parent: Turn | None
    context: tuple[int, ...]
    choice: ModelChoice
    call: int
    reason: Branch
    request: ModelRequest
    text: str = ""
    """Prompt of a completion."""
    children: list[Turn] = field(default_factory=list)

    @property
    def generation(self) -> Generation:
        """The sampled tokens."""
        return self.choice.generation

    def path(self) -> list[Turn]:
        """Return the turns from the first one to this one."""
        turns: list[Turn] = []
        at: Turn | None = self
        while at is not None:
            turns.append(at)
            at = at.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """Return all ids that the model read and wrote up to the end of this turn."""
        return [token for turn in self.path() for token in (*turn.context, *turn.generation.token_ids)]

    def beginning_of(self, prompt: str | Sequence[int]) -> int:
        """Return the length of the text or ids up to the end of this turn if ``prompt`` begins with them, else 0.

        A stop string is a part of the text. An end token has no text.
        """
        if isinstance(prompt, str):
            text = self.text + self.choice.raw_text
            return len(text) if len(prompt) > len(self.text) and prompt.startswith(text) else 0
        ids = self.ids()
        return len(ids) if list(prompt[: len(ids)]) == ids else 0


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a request in the tree.

    Attributes:
        parent: Sampled turn that it continues.
        context: New ids after that turn, or all ids of the prompt.
        messages: Number of messages of the chat up to that turn.
        known: Whether a sampled turn was found that the template cannot continue.
        digest: Digest of the whole chat.
    """

    parent: Turn | None
    context: tuple[int, ...]
    messages: int = 0
    known: bool = False
    digest: bytes = b""


class History:
    """Sampled turns of one session as a tree. A request continues a sampled turn or begins a new path.

    Args:
        renderer: Renderer of the model's chats. ``None`` allows completions only.
        encode: Returns the ids of a text that continues another.
        decode: Returns the text of ids.
    """

    def __init__(
        self,
        renderer: ChatRenderer | None,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._renderer, self._encode, self._decode = renderer, encode, decode
        self._roots: list[Turn] = []
        self._index: dict[bytes, list[Turn]] = {}
        self._texts: list[Turn] = []

    def place(self, request: ModelRequest) -> Place:
        """Return the position of a request in the tree.

        Raises:
            RequestRefusedError: The request is empty, is a chat without a template, or continues an unknown reply.
            DataError: The template rejects the chat.
        """
        if request.prompt is not None:
            return self._place_of_text(request.prompt, request.member)
        if self._renderer is None:
            raise RequestRefusedError(
                400, "chat", "chats are not supported: the model has no chat template; use completions"
            )
        chain = _chain(request)
        parent, at = self._known(request.messages, chain)
        if request.continued:
            content, raw = request.messages[-1].get("content") or "", parent.choice.raw_text if parent else ""
            if parent is None or at != len(request.messages):
                fault = "is not a reply of this session, so its token ids are unknown"
            elif parent.generation.finish is FinishReason.END_OF_TEXT:
                fault = "is over: the model ended this reply itself; expected one that was cut off"
            elif parent.generation.finish is FinishReason.STOP and not content.endswith(raw):
                fault = f"lacks the stop string that ended the reply; expected {raw[-80:]!r} at its end"
            else:
                return Place(parent, (), at, digest=chain[-2])
            raise RequestRefusedError(400, "request", f"continue_final_message: the last message {fault}")
        if parent is not None:
            ids = parent.generation.token_ids
            new = self._renderer.new_ids(
                request.messages, request.tools, sampled=at - 1, last_id=ids[-1] if ids else None
            )
            if new is not None:
                return Place(parent, tuple(new), at, digest=chain[-1])
        context = tuple(self._renderer.prompt_ids(request.messages, request.tools))
        return Place(None, context, known=parent is not None, digest=chain[-1])

    def _known(
        self, messages: Sequence[Mapping[str, Any]], chain: Sequence[bytes]
    ) -> tuple[Turn | None, int]:
        """Return the sampled turn that ends the longest known prefix of a chat, and the number of messages up to it.

        Args:
            chain: Digest of each prefix.
        """
        for at in range(len(messages), 0, -1):
            message = messages[at - 1]
            if message.get("role") == "assistant" and (turns := self._index.get(chain[at])):
                calls = [call.get("id") for call in message.get("tool_calls") or ()]
                same = [turn for turn in turns if [call.id for call in turn.choice.calls] == calls]
                return (same or turns)[-1], at
        return None, 0

    def _place_of_text(self, prompt: str | Sequence[int], member: str) -> Place:
        """Return the position of a text or of ids: they continue the longest known sequence that they begin with.

        A text continues a reply with an end token only if it has that token's text behind the reply.
        """
        if not prompt:
            raise RequestRefusedError(400, "request", "prompt: got an empty one, expected text or token ids")
        own = [turn for turn in self._texts if turn.request.member == member]
        known = [(length, turn) for turn in own if (length := turn.beginning_of(prompt))]
        for length, turn in sorted(known, key=lambda each: -each[0]):
            if not isinstance(prompt, str):
                return Place(turn, tuple(prompt[length:]))
            last = [*turn.generation.token_ids[-1:]]
            ended = turn.generation.finish is FinishReason.END_OF_TEXT
            over = ended and not self._decode(last)  # some servers report no end token
            if not over or self._encode(prompt[length : length + _LONGEST_END])[:1] == last:
                return Place(turn, tuple(self._encode(prompt[length:])[over:]))
        return Place(None, tuple(self._encode(prompt) if isinstance(prompt, str) else prompt))

    def _why(self, request: ModelRequest, place: Place) -> Branch:
        """Return why a turn begins a new path."""
        if place.known:
            return Branch.TEMPLATE
        if not self._roots:
            return Branch.FIRST
        siblings = self._roots if place.parent is None else place.parent.children
        own = [turn for turn in siblings if turn.request.member == request.member]
        if any(turn.context == place.context for turn in own):
            return Branch.FORK
        if request.prompt is not None:
            begun = any(place.context[: len(root.context)] == root.context for root in own)
            return Branch.FORK if place.parent else Branch.EDITED if begun else Branch.NEW
        return self._rewritten(request, place)

    def _rewritten(self, request: ModelRequest, place: Place) -> Branch:
        """Return how a known history was changed. A sampled prefix followed only by new messages is a fork."""
        if place.parent is not None and all(
            message.get("role") != "assistant" for message in request.messages[place.messages :]
        ):
            return Branch.FORK
        leaves = [
            leaf
            for leaf in _leaves(self._roots)
            if leaf.request.prompt is None and leaf.request.member == request.member
        ]
        return _compared(request, leaves)

    def add(self, request: ModelRequest, place: Place, choice: ModelChoice, call: int) -> None:
        """Store a sampled choice of a request at its position."""
        turn = Turn(place.parent, place.context, choice, call, self._why(request, place), request)
        (self._roots if place.parent is None else place.parent.children).append(turn)
        if (
            place.parent is not None
        ):  # only the last request of a path is read, and each one holds the whole history
            place.parent.request = replace(place.parent.request, messages=(), tools=())
        if request.prompt is not None:
            prompt = request.prompt
            turn.text = prompt if isinstance(prompt, str) else self._decode(list(prompt))
            self._texts.append(turn)
            return
        # A client may append the stop string that is missing in the reply, as smolagents does.
        forms = {choice.text} if choice.calls else {choice.text, choice.raw_text}
        begun = str(request.messages[-1].get("content") or "") if request.continued else ""
        for text in forms:
            said = canonical_message({**choice.message, "content": begun + text})
            self._index.setdefault(_digest(place.digest, said), []).append(turn)

    def trajectories(self) -> list[Sampled]:
        """Return the trajectories so far. Each sampled token is trained in the first trajectory that contains it."""
        named: dict[Turn, str] = {}
        found: list[Sampled] = []
        for number, leaf in enumerate(_leaves(self._roots)):
            found.append(_sampled(str(number), leaf, named))
            for turn in leaf.path():
                named.setdefault(turn, str(number))
        return found


def _leaves(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield the last turn of each path, in the order in which the paths branched off."""
    left = list(reversed(turns))
    while left:
        turn = left.pop()
        if turn.children:
            left += reversed(turn.children)
        else:
            yield turn


def _sampled(name: str, leaf: Turn, named: Mapping[Turn, str]) -> Sampled:
    """Return the trajectory that ends with a turn.

    Args:
        named: Turns that earlier trajectories train, with the names of these trajectories.
    """
    path = leaf.path()
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    turns: list[SampledTurn] = []
    for number, turn in enumerate(path):
        between = turn.context if number else ()
        sampled, trained = turn.generation.token_ids, turn not in named
        begin = len(ids) + len(between)
        ids += (*between, *sampled)
        mask += [0] * len(between) + [int(trained)] * len(sampled)
        logprobs += [0.0] * len(between) + list(turn.generation.logprobs)
        finish, calls = turn.generation.finish, len(turn.choice.calls)
        turns.append(SampledTurn(begin, len(ids), turn.call, finish, trained, calls))
    own = next((turn for turn in path if turn not in named), leaf)
    shared = [named[turn] for turn in path if turn in named]
    return Sampled(
        name=name,
        reason=own.reason,
        parent=shared[-1] if shared else "",
        prompt_ids=path[0].context,
        response_ids=tuple(ids),
        response_mask=tuple(mask),
        logprobs=tuple(logprobs) if len(logprobs) == len(ids) else (),
        turns=tuple(turns),
        messages=_conversation(leaf),
        tools=tuple(leaf.request.tools),
        member=leaf.request.member,
    )


def _conversation(leaf: Turn) -> tuple[Mapping[str, Any], ...]:
    *messages, last = (*leaf.request.messages, leaf.choice.message)
    if leaf.request.continued:
        begun = messages.pop()
        last = {**last, "content": f"{begun.get('content') or ''}{last['content'] or ''}"}
    if leaf.request.prompt is None:
        return (*messages, last)
    return ({"prompt": leaf.text, "completion": leaf.choice.raw_text},)


def _compared(request: ModelRequest, leaves: Sequence[Turn]) -> Branch:
    """Return how a request differs from the known history with which it shares the most messages."""
    new = [canonical_message(message) for message in request.messages]
    best, reason = 0, Branch.NEW
    for leaf in leaves:
        old = [canonical_message(message) for message in (*leaf.request.messages, leaf.choice.message)]
        words = set(old) - {
            canonical_message(message) for message in request.messages if message.get("role") == "system"
        }
        shared = [place for place, message in enumerate(new) if message in words]
        if len(shared) <= best:
            continue
        best = len(shared)
        history = new[: shared[-1] + 1]
        if Counter(history) - Counter(old):
            reason = Branch.EDITED
        elif history == old[: len(history)] and leaf.request.tools != request.tools:
            reason = Branch.TOOLS
        else:
            left = iter(old)
            reason = Branch.TRIMMED if all(message in left for message in history) else Branch.REORDERED
    return reason


def _chain(request: ModelRequest) -> list[bytes]:
    """Return a digest of each prefix of a member's chat, starting with the empty prefix."""
    chain = [_digest(request.member.encode(), json.dumps(list(request.tools), sort_keys=True))]
    for message in request.messages:
        chain.append(_digest(chain[-1], canonical_message(message)))
    return chain


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
