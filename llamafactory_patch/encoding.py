"""Encode rows as token ids and labels.

LLaMA-Factory's processors cut, reverse and pack token lists by length only. Each row therefore passes through them
twice, once as ids and once as labels of the same length.

Importing this module imports LLaMA-Factory; call :func:`llamafactory_patch.engine.load_engine` first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from llamafactory.data import loader
from llamafactory.data.processor import (
    FeedbackDatasetProcessor,
    PackedSupervisedDatasetProcessor,
    PairwiseDatasetProcessor,
    SupervisedDatasetProcessor,
)

from afm.errors import DataError
from llamafactory_patch.masks import IGNORE_INDEX, MASKING_REVISION, MaskedTemplate, rendering
from llamafactory_patch.reading import FAULT_COLUMN, ROW_COLUMN, BadRow, RowName
from llamafactory_patch.settings import SftSettings

Examples = dict[str, list[Any]]
"""A batch of aligned rows, or of model inputs, by column."""

_MEDIA = ("images", "videos", "audios")
_NO_SUBSEQUENCE = {"image_subseq_ids": [0], "video_subseq_ids": [0], "audio_subseq_ids": [0]}
_FILLERS: Mapping[str, Any] = {
    "kto_tags": False,
    **dict.fromkeys(_MEDIA),
    "packing_params": {"sequence_boundaries": [0, 1], **_NO_SUBSEQUENCE, "right_padding_length": 0},
}
"""Values in a row that is only a fault; its other columns contain ``[0]``."""


class _AuthorMask:
    """Mixin for stock processors: labels only what the agent wrote, and returns bad rows in addition to good ones.

    Extends ``__init__``, because the stock dataclass never calls ``__post_init__``.
    """

    template: Any
    tokenizer: Any
    data_args: Any
    columns: tuple[str, ...]
    replays = True  # the stock processor gets the encoding that the check made

    def __init__(self, settings: SftSettings, **stock: Any) -> None:
        super().__init__(**stock)
        self.masking_revision = MASKING_REVISION  # part of the fingerprint of the cached data set
        self._encoded: Iterator[Any] | None = None
        silent = settings.roles_without_loss
        self.template = MaskedTemplate(
            self.template, settings.masked_tags, settings.observation_boundary, silent
        )

    def preprocess_dataset(self, examples: Examples) -> Examples:
        """Return the token ids and labels of a batch of rows.

        A row that cannot be trained on becomes a fault in ``FAULT_COLUMN``, for :meth:`BadRowReport.sieve`.
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
        """Return the model inputs of one row.

        Raises:
            DataError: The row cannot be trained on.
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
            cutoff_len = self.data_args.cutoff_len + bool(self.data_args.packing)  # as the user set it
            raise DataError(
                f"nothing to train on{what}: no token of the agent is left within cutoff_len={cutoff_len}, "
                "or only the end of a turn"
            )

    def _conversations(self, examples: Examples) -> Iterator[Iterator[Mapping[str, Any]]]:
        """Yield the conversations of all valid rows without media; loading media twice would cost more than it saves."""
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
    """Turns each row into one sequence."""

    columns = ("input_ids", "attention_mask", "labels", *_MEDIA)

    def _conversations_of(self, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        discard = self.data_args.mask_history and not self.template.preserve_thinking
        for conversation in super()._conversations_of(row):
            yield {**conversation, "discarding_history_cot": discard}

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        self._check_trained(encoded[1])


class AgentPackedProcessor(AgentSupervisedProcessor, PackedSupervisedDatasetProcessor):
    """Packs several rows into one sequence (``packing``, ``neat_packing``)."""

    def _columns(self) -> tuple[str, ...]:
        isolated = ("packing_params",) if self.data_args.neat_packing else ()
        return (*self.columns, "position_ids", *isolated)

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        super()._check_labels(encoded)
        if len(encoded[0]) > self.data_args.cutoff_len:
            raise DataError(f"{len(encoded[0])} tokens do not fit into a pack of {self.data_args.cutoff_len}")


class AgentPairwiseProcessor(_AuthorMask, PairwiseDatasetProcessor):
    """Encodes a chosen and a rejected response to one prompt (DPO and similar)."""

    columns = (
        *("chosen_input_ids", "chosen_attention_mask", "chosen_labels"),
        *("rejected_input_ids", "rejected_attention_mask", "rejected_labels"),
        *_MEDIA,
    )

    def _check_labels(self, encoded: tuple[Any, ...]) -> None:
        self._check_trained(encoded[1], " in the chosen response")
        self._check_trained(encoded[3], " in the rejected response")
        if encoded[0] == encoded[2]:
            raise DataError("the chosen and the rejected response are the same")


class AgentFeedbackProcessor(_AuthorMask, FeedbackDatasetProcessor):
    """Encodes a response that is desired or not (KTO), and that of another row to estimate the divergence."""

    columns = (
        *("input_ids", "attention_mask", "labels", "kl_input_ids", "kl_attention_mask", "kl_labels"),
        *("kto_tags", *_MEDIA),
    )
    replays = False  # the other row is known only after bad rows are removed

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
    stage: str, stock: Mapping[str, Any], settings: SftSettings, *, do_generate: bool = False
) -> Any:
    """Return the processor for a stage: ours if single tokens have a loss, otherwise LLaMA-Factory's.

    Args:
        stock: ``template``, ``tokenizer``, ``processor`` and ``data_args`` for LLaMA-Factory's processors.
        do_generate: Whether the rows are questions that the model answers in an evaluation.
    """
    chosen = loader._get_dataset_processor(**stock, stage=stage, do_generate=do_generate)
    masked = _MASKED.get(type(chosen))
    return chosen if masked is None else masked(settings, **stock)


def _arguments(examples: Examples, index: int) -> dict[str, Any]:
    """Return one row in the form that the stock processors pass to ``_encode_data_example``."""
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
