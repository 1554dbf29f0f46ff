"""From conversations to token ids and labels: who wrote a token decides whether it is trained on.

LLaMA-Factory's processors do the rest: they cut, reverse and pack token lists by length alone. So each row goes through
them twice, once as ids and once as labels of the same length.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.engine.load_engine` comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, cycle
from typing import Any

from llamafactory.data import loader
from llamafactory.data.processor import (
    FeedbackDatasetProcessor,
    PackedSupervisedDatasetProcessor,
    PairwiseDatasetProcessor,
    SupervisedDatasetProcessor,
)
from llamafactory.extras.constants import IGNORE_INDEX

from afm.errors import ConfigError, DataError
from afm.masking import Boundary, encode_batch
from afm.trajectory import Author, Segment
from llamafactory_patch.arguments import MASKING_REVISION, AgentArguments
from llamafactory_patch.bad_rows import FAULT_COLUMN, ROW_COLUMN, BadRow, RowName
from llamafactory_patch.spans import segments_by_tag

Examples = dict[str, list[Any]]
"""A batch of aligned rows, or of model inputs, by column."""

Text = tuple[str, ...]
"""A text in which the agent and the environment take turns, the agent first."""

CHARS_PER_CALL = 1_000_000
"""Bounds the memory of one tokenizer call: an encoding holds far more than the ids that are kept of it."""

_FENCE_OPEN, _FENCE_CLOSE = "\ue000", "\ue001"
_MEDIA = ("images", "videos", "audios")
_NO_SUBSEQUENCE = {"image_subseq_ids": [0], "video_subseq_ids": [0], "audio_subseq_ids": [0]}
_FILLERS: Mapping[str, Any] = {
    "kto_tags": False,
    **dict.fromkeys(_MEDIA),
    "packing_params": {"sequence_boundaries": [0, 1], **_NO_SUBSEQUENCE, "right_padding_length": 0},
}
"""What stands in the columns of a row that is only a fault; elsewhere ``[0]``."""


class TextEncoder:
    """Encodes texts of two authors, many in few calls of the tokenizer, which is several times faster than one by one."""

    def __init__(self, tokenizer: Any, boundary: Boundary, roles_without_loss: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._boundary = boundary
        self._silent = tuple(roles_without_loss)
        self._encoded: dict[Text, tuple[list[int], list[int]]] = {}

    def learn(self, texts: Iterable[Text]) -> None:
        """Encode the texts that are not known yet."""
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
        """Drop what was encoded."""
        self._encoded = {}

    def ids_and_mask(self, draft: Sequence[int | Text]) -> tuple[list[int], list[int]]:
        """Token ids of what a template wrote, and as long a mask: 0 where the environment wrote."""
        self.learn(part for part in draft if isinstance(part, tuple))
        parts = [self._encoded[part] if isinstance(part, tuple) else ([part], [1]) for part in draft]
        ids, masks = ([part[side] for part in parts] for side in (0, 1))
        return list(chain.from_iterable(ids)), list(chain.from_iterable(masks))


class DraftTokenizer:
    """Stands for a tokenizer while a template puts a conversation together: a text stays a text, cut at its fences."""

    def __init__(self, tokenizer: Any, fence: str) -> None:
        self._tokenizer = tokenizer
        self._fence = fence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[Text]:
        """The text itself, in the place of its ids."""
        assert not add_special_tokens
        return [tuple(text.split(self._fence))]


class MaskedTemplate:
    """A LLaMA-Factory template whose turns come as token ids or, while ``labelling``, as labels of the same length.

    A turn whose message says ``loss: False`` has no labels. With ``tags``, neither has what stands between them in the
    assistant's turns, nor blank template text behind the end of a turn. A prompt may explain the tags: it is not searched,
    and rollouts encode prompts in one piece.
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
        """Encode ahead the texts of conversations (``messages``, ``system``, ``tools`` and the options of a template).

        They are kept until :meth:`forget`.
        """
        if not self._tags:
            return
        texts: dict[Text, None] = {}
        for conversation in conversations:
            with suppress(DataError), rendering():  # it is named when the row itself is encoded
                drafts = self._template.encode_multiturn(**self._draft(tokenizer, **conversation))
                parts = chain.from_iterable(chain.from_iterable(drafts))
                texts |= dict.fromkeys(part for part in parts if isinstance(part, tuple))
        self._encoder = self._new_encoder(tokenizer)
        self._encoder.learn(texts)

    def forget(self) -> None:
        """Drop what was encoded ahead."""
        self._encoder = None

    def encode_multiturn(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> list[tuple[list[int], list[int]]]:
        """Pairs of a prompt and a response, like the template's own."""
        draft = self._draft(tokenizer, messages)
        pairs = self._template.encode_multiturn(draft["tokenizer"], draft["messages"], *args, **kwargs)
        return [
            self._turn(tokenizer, source, target, message)
            for (source, target), message in zip(pairs, messages[1::2], strict=True)
        ]

    def encode_oneturn(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Everything before the last turn, and the last turn, like the template's own."""
        draft = self._draft(tokenizer, messages)
        source, target = self._template.encode_oneturn(draft["tokenizer"], draft["messages"], *args, **kwargs)
        return self._turn(tokenizer, source, target, messages[-1])

    def _draft(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **other: Any) -> dict[str, Any]:
        """What the template is called with: with tags, fences stand between the authors of the assistant's turns."""
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
    """Mask the blank template text behind the last end token."""
    for position in range(len(ids) - 1, -1, -1):
        if not mask[position]:
            return
        if ids[position] == tokenizer.eos_token_id:
            mask[position + 1 :] = [0] * (len(ids) - position - 1)
            return
        if tokenizer.decode([ids[position]]).strip():
            return


def _unused_fence(messages: Iterable[Mapping[str, Any]]) -> str:
    """A text that occurs in no message; it cannot overlap itself, so a split at it is unambiguous."""
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


class _AuthorMask:
    """Mixed into a stock processor: labels only on what the agent wrote, and bad rows beside the good ones.

    It extends ``__init__`` and not ``__post_init__``, which the stock dataclass never calls.
    """

    template: Any
    tokenizer: Any
    data_args: Any
    columns: tuple[str, ...]
    replays = True  # what was encoded to check a row is what the stock processor gets

    def __init__(self, agent: AgentArguments, **stock: Any) -> None:
        super().__init__(**stock)
        self.masking_revision = MASKING_REVISION  # part of the fingerprint of the cached data set
        self._encoded: Iterator[Any] | None = None
        boundary = Boundary(agent.observation_boundary)
        tags = agent.observation_tags if agent.ignore_observation else ()
        self.template = MaskedTemplate(self.template, tags, boundary, agent.silent_roles)

    def preprocess_dataset(self, examples: Examples) -> Examples:
        """Token ids and labels of a batch of rows.

        A row that cannot be trained on becomes a fault in ``FAULT_COLUMN``, for :func:`llamafactory_patch.bad_rows.sieve`.
        """
        self.template.collect(chain.from_iterable(self._conversations(examples)), self.tokenizer)
        faults: list[BadRow] = []
        encoded, kept = [], []
        for index in range(len(examples["_prompt"])):
            try:
                encoded.append(self._checked(examples, index))
                kept.append(index)
            except DataError as error:
                faults.append(_bad_row(examples, index, error.message))
        self._encoded = iter(encoded) if self.replays else None
        good = {column: [values[index] for index in kept] for column, values in examples.items()}
        inputs: Examples = super().preprocess_dataset(good)  # type: ignore
        self._encoded = None
        self.template.forget()
        rows = len(inputs.get(self.columns[0], ()))
        inputs = {
            column: [*inputs.get(column, ()), *([_FILLERS.get(column, [0])] * len(faults))]
            for column in self._columns()
        }
        return {**inputs, FAULT_COLUMN: [*[""] * rows, *(fault.dump() for fault in faults)]}

    def _columns(self) -> tuple[str, ...]:
        return self.columns

    def _checked(self, examples: Examples, index: int) -> Any:
        """The model inputs of one row.

        Raises:
            DataError: It cannot be trained on.
        """
        if fault := _fault(examples, index):
            raise DataError(BadRow.load(fault).reason)
        with rendering():
            encoded = self._encode_data_example(**_arguments(examples, index))
        self._check_labels(encoded)
        return encoded

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        """Refuse a row without a trained token."""
        raise NotImplementedError

    def _check_trained(self, labels: Sequence[int], what: str = "") -> None:
        if set(labels) <= {IGNORE_INDEX, self.tokenizer.eos_token_id}:
            cutoff_len = self.data_args.cutoff_len + bool(self.data_args.packing)  # as the user gave it
            raise DataError(
                f"nothing to train on{what}: no token of the agent is left within cutoff_len={cutoff_len}, "
                "or no more than the end of a turn"
            )

    def _conversations(self, examples: Examples) -> Iterator[Iterator[Mapping[str, Any]]]:
        """The conversations of every sound row without media; loading media twice would cost more than it saves."""
        for index in range(len(examples["_prompt"])):
            if not _fault(examples, index) and not any(examples[f"_{media}"][index] for media in _MEDIA):
                yield self._conversations_of(_arguments(examples, index))

    def _conversations_of(self, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        for response in row["response"]:
            yield {"messages": [*row["prompt"], response], "system": row["system"], "tools": row["tools"]}

    def _encode_data_example(self, *args: Any, **kwargs: Any) -> Any:
        if self._encoded is not None:
            return next(self._encoded)
        ids = super()._encode_data_example(*args, **kwargs)  # type: ignore
        self.template.labelling = True
        try:
            labels = super()._encode_data_example(*args, **kwargs)  # type: ignore
        finally:
            self.template.labelling = False
        return tuple(labels[place] if place in (1, 3) else part for place, part in enumerate(ids))


class AgentSupervisedProcessor(_AuthorMask, SupervisedDatasetProcessor):
    """One row, one sequence."""

    columns = ("input_ids", "attention_mask", "labels", *_MEDIA)

    def _conversations_of(self, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        discard = self.data_args.mask_history and not self.template.preserve_thinking
        for conversation in super()._conversations_of(row):
            yield {**conversation, "discarding_history_cot": discard}

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        self._check_trained(encoded[1])


class AgentPackedProcessor(AgentSupervisedProcessor, PackedSupervisedDatasetProcessor):
    """Several rows in one sequence (``packing``, ``neat_packing``)."""

    def _columns(self) -> tuple[str, ...]:
        isolated = ("packing_params",) if self.data_args.neat_packing else ()
        return (*self.columns, "position_ids", *isolated)

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        super()._check_labels(encoded)
        if len(encoded[0]) > self.data_args.cutoff_len:
            raise DataError(f"{len(encoded[0])} tokens do not fit into a pack of {self.data_args.cutoff_len}")


class AgentPairwiseProcessor(_AuthorMask, PairwiseDatasetProcessor):
    """A chosen and a rejected response to one prompt (DPO and its kin)."""

    columns = (
        *("chosen_input_ids", "chosen_attention_mask", "chosen_labels"),
        *("rejected_input_ids", "rejected_attention_mask", "rejected_labels"),
        *_MEDIA,
    )

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        self._check_trained(encoded[1], " in the chosen response")
        self._check_trained(encoded[3], " in the rejected response")
        if encoded[0] == encoded[2]:
            raise DataError("the chosen and the rejected response are the same, so nothing tells them apart")


class AgentFeedbackProcessor(_AuthorMask, FeedbackDatasetProcessor):
    """A response that is desired or not (KTO), and another row's response for the estimate of the divergence."""

    columns = (
        *("input_ids", "attention_mask", "labels", "kl_input_ids", "kl_attention_mask", "kl_labels"),
        *("kto_tags", *_MEDIA),
    )
    replays = False  # the other row is known only when the bad ones are gone

    def _checked(self, examples: Examples, index: int) -> Any:
        return super()._checked({**examples, "_kl_response": examples["_response"]}, index)

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        self._check_trained(encoded[1])


_MASKED = {
    SupervisedDatasetProcessor: AgentSupervisedProcessor,
    PackedSupervisedDatasetProcessor: AgentPackedProcessor,
    PairwiseDatasetProcessor: AgentPairwiseProcessor,
    FeedbackDatasetProcessor: AgentFeedbackProcessor,
}


def row_processor(
    stage: str, stock: Mapping[str, Any], agent: AgentArguments, *, do_generate: bool = False
) -> Any:
    """What encodes the rows of a kind of training: ours where a loss falls on single tokens, else LLaMA-Factory's.

    Args:
        stock: ``template``, ``tokenizer``, ``processor`` and ``data_args`` of LLaMA-Factory's processors.
        do_generate: Whether the rows are questions that the model answers in an evaluation.
    """
    chosen = loader._get_dataset_processor(**stock, stage=stage, do_generate=do_generate)
    masked = _MASKED.get(type(chosen))
    return chosen if masked is None else masked(agent, **stock)


def _arguments(examples: Examples, index: int) -> dict[str, Any]:
    """One row as the stock processors pass it to ``_encode_data_example``."""
    texts = {key: examples[f"_{key}"][index] for key in ("prompt", "response", "system", "tools")}
    media = {key: examples[f"_{key}"][index] or [] for key in _MEDIA}
    other = {"kl_response": examples["_kl_response"][index]} if "_kl_response" in examples else {}
    return {**texts, **media, **other}


def _fault(examples: Examples, index: int) -> str:
    return str(examples[FAULT_COLUMN][index] or "") if FAULT_COLUMN in examples else ""


def _bad_row(examples: Examples, index: int, reason: str) -> BadRow:
    turns = examples["_prompt"][index]
    question = str(turns[0]["content"]) if turns else ""
    return BadRow(RowName.load(examples[ROW_COLUMN][index]), reason, question)
