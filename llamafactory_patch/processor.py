"""LLaMA-Factory's data processors with the author mask, and how they get into its data pipeline.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from datasets import Dataset
from llamafactory.data import loader
from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
from llamafactory.data.processor import (
    FeedbackDatasetProcessor,
    PackedSupervisedDatasetProcessor,
    PairwiseDatasetProcessor,
    SupervisedDatasetProcessor,
)
from llamafactory.extras.constants import IGNORE_INDEX

from afm.errors import DataError
from afm.masking import Boundary
from llamafactory_patch.arguments import MASKING_REVISION, AgentDataArguments
from llamafactory_patch.authors import (
    AuthorTemplate,
    TurnTemplate,
    check_chat_template,
    ids_and_labels,
    rendering,
)
from llamafactory_patch.bad_rows import BadRow, RowName
from llamafactory_patch.loading import FAULT_COLUMN, ROW_COLUMN, sieve
from llamafactory_patch.prompts import note_prompts
from llamafactory_patch.spans import check_roles
from llamafactory_patch.stored import store_origin

Examples = dict[str, list[Any]]
"""A batch of aligned rows, or of model inputs, by column."""

_NO_SUBSEQUENCE = {"image_subseq_ids": [0], "video_subseq_ids": [0], "audio_subseq_ids": [0]}
_FILLERS: Mapping[str, Any] = {
    "kto_tags": False,
    "images": None,
    "videos": None,
    "audios": None,
    "packing_params": {"sequence_boundaries": [0, 1], **_NO_SUBSEQUENCE, "right_padding_length": 0},
}
"""What stands in the columns of a row that is only a fault until :func:`sieve`; elsewhere ``[0]``."""


class _AuthorMask:
    """Mixed into a stock processor: labels only on what the agent wrote, and bad rows beside the good ones.

    It extends ``__init__`` and not ``__post_init__``, which the stock dataclass never calls: the mask would
    silently do nothing while the loss falls as usual.
    """

    template: Any
    tokenizer: Any
    data_args: AgentDataArguments
    columns: tuple[str, ...]
    replays = True  # what was encoded to check a row is what the stock processor gets

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masking_revision = MASKING_REVISION  # part of the fingerprint of the cached data set
        self._encoded: Iterator[Any] | None = None
        if self.data_args.match_chat_template:
            check_chat_template(self.template, self.tokenizer)
        if self.data_args.ignore_observation:
            boundary = Boundary(self.data_args.observation_boundary)
            tags, silent = self.data_args.observation_tags, self.data_args.silent_roles
            self.template = AuthorTemplate(self.template, tags, boundary, silent)
        else:
            self.template = TurnTemplate(self.template)

    def preprocess_dataset(self, examples: Examples) -> Examples:
        """Token ids and labels of a batch of rows.

        A row without a trained token becomes a fault in ``FAULT_COLUMN``, for :func:`sieve`. Streamed rows are
        sifted here, since nobody sees them all.

        Raises:
            DataError: A streamed row cannot be trained on and ``on_bad_rows`` is ``error``.
        """
        if ROW_COLUMN not in examples:
            return super().preprocess_dataset(examples)  # type: ignore
        if isinstance(self.template, AuthorTemplate):
            self._encode_ahead(self.template, examples)
        try:
            return self._sifted(examples)
        finally:
            self._encoded = None
            if isinstance(self.template, AuthorTemplate):
                self.template.forget()

    def _sifted(self, examples: Examples) -> Examples:
        faults: list[BadRow] = []
        encoded, kept = [], []
        for index in range(len(examples["_prompt"])):
            try:
                encoded.append(self._checked(examples, index))
                kept.append(index)
            except DataError as error:
                faults.append(BadRow(_name(examples, index), error.message, _question(examples, index)))
        self._encoded = iter(encoded) if self.replays else None
        good = {column: [values[index] for index in kept] for column, values in examples.items()}
        inputs: Examples = super().preprocess_dataset(good)  # type: ignore
        if self.data_args.streaming:
            return self._streamed(inputs, faults)
        rows = len(inputs.get(self.columns[0], ()))
        inputs = {
            column: [*inputs.get(column, ()), *([_FILLERS.get(column, [0])] * len(faults))]
            for column in self._columns()
        }
        return {**inputs, FAULT_COLUMN: [*[""] * rows, *(fault.dump() for fault in faults)]}

    def _columns(self) -> tuple[str, ...]:
        return self.columns

    def _streamed(self, inputs: Examples, faults: Sequence[BadRow]) -> Examples:
        serious = [fault for fault in faults if fault.is_fault]
        if serious and self.data_args.on_bad_rows == "error":
            raise DataError("\n".join(map(str, serious)))
        for fault in faults:
            print(f"bad row left out: {fault}", file=sys.stderr)
        return inputs

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

    def _encode_ahead(self, template: AuthorTemplate, examples: Examples) -> None:
        """Encode the texts of the whole batch in few calls of the tokenizer: most of the time goes there."""
        author_tokenizer = template.collect(self.tokenizer)
        for index in range(len(examples["_prompt"])):
            if _fault(examples, index):
                continue
            if any(examples[media][index] for media in ("_images", "_videos", "_audios")):
                continue  # loading media twice would cost more than it saves
            with suppress(DataError), rendering():  # told when the row is checked
                self._collect(template, examples, index)
        author_tokenizer.encode_collected()

    def _collect(self, template: AuthorTemplate, examples: Examples, index: int) -> None:
        for response in examples["_response"][index]:
            messages = [*examples["_prompt"][index], response]
            template.encode_oneturn(
                self.tokenizer, messages, examples["_system"][index], examples["_tools"][index]
            )

    def _encode_data_example(self, *args: Any, **kwargs: Any) -> Any:
        if self._encoded is not None:
            return next(self._encoded)
        encoded = super()._encode_data_example(*args, **kwargs)  # type: ignore
        pairs = zip(encoded[0::2], encoded[1::2], strict=False)
        turned = [part for ids, labels in pairs for part in ids_and_labels(ids, labels, IGNORE_INDEX)]
        return (*turned, *encoded[len(turned) :])


class AgentSupervisedProcessor(_AuthorMask, SupervisedDatasetProcessor):
    """One row, one sequence."""

    columns = ("input_ids", "attention_mask", "labels", "images", "videos", "audios")

    def _collect(self, template: AuthorTemplate, examples: Examples, index: int) -> None:
        template.encode_multiturn(
            self.tokenizer,
            [*examples["_prompt"][index], *examples["_response"][index]],
            examples["_system"][index],
            examples["_tools"][index],
            self.data_args.mask_history and not template.preserve_thinking,
        )

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
        *("images", "videos", "audios"),
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
        *("kto_tags", "images", "videos", "audios"),
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


def install_processor() -> None:
    """Put the masking processors into LLaMA-Factory's data loader (0.9.5, data/loader.py).

    Two functions of that module are wrapped, since it has no registry: ``_get_dataset_processor`` chooses the
    processor, and ``_get_preprocessed_dataset`` returns the data set whose faults are to be told.
    """
    loader._get_dataset_processor = _masking(loader._get_dataset_processor)
    loader._get_preprocessed_dataset = _sieving(loader._get_preprocessed_dataset)


def _masking(choose: Any) -> Any:
    @functools.wraps(choose)
    def choose_masking(
        data_args: Any, stage: str, template: Any, tokenizer: Any, processor: Any, do_generate: bool = False
    ) -> Any:
        stock = choose(data_args, stage, template, tokenizer, processor, do_generate)
        if not isinstance(data_args, AgentDataArguments) or do_generate:
            return stock
        store_origin(data_args)
        masked = _MASKED.get(type(stock))
        if masked is not None:
            return masked(template=template, tokenizer=tokenizer, processor=processor, data_args=data_args)
        if data_args.ignore_observation:
            raise ValueError(f"ignore_observation does not work in stage {stage!r}")
        return stock

    return choose_masking


def _sieving(preprocess: Any) -> Any:
    @functools.wraps(preprocess)
    def preprocess_and_sieve(
        dataset: Any, data_args: Any, training_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        named = isinstance(dataset, Dataset) and ROW_COLUMN in dataset.column_names
        if named and not kwargs.get("is_eval") and not data_args.sample:
            check_roles(dataset, data_args.silent_roles)
            note_prompts(dataset, data_args)
        done = preprocess(dataset, data_args, training_args, *args, **kwargs)
        if isinstance(done, Dataset) and FAULT_COLUMN in done.column_names:
            return sieve(done, data_args, training_args)
        return done

    return preprocess_and_sieve


def _arguments(examples: Examples, index: int) -> dict[str, Any]:
    """One row as the stock processors pass it to ``_encode_data_example``."""
    given = {key: examples[f"_{key}"][index] for key in ("prompt", "response", "system", "tools")}
    media = {key: examples[f"_{key}"][index] or [] for key in ("images", "videos", "audios")}
    other = {"kl_response": examples["_kl_response"][index]} if "_kl_response" in examples else {}
    return {**given, **media, **other}


def _fault(examples: Examples, index: int) -> str:
    return str(examples[FAULT_COLUMN][index] or "") if FAULT_COLUMN in examples else ""


def _name(examples: Examples, index: int) -> RowName:
    return RowName.load(examples[ROW_COLUMN][index])


def _question(examples: Examples, index: int) -> str:
    turns = examples["_prompt"][index]
    return str(turns[0]["content"]) if turns else ""


_SHOWN_TOKENS = 40


def check_batch(labels_BT: Any, ids_BT: Any, tokenizer: Any) -> None:
    """Refuse a batch none of whose labels takes part in the loss (that at position 0 never does).

    Preprocessing refuses such rows by name; this is for data that was tokenized elsewhere, where the loss
    would be 0/0 and spoil the model.

    Raises:
        DataError: It names the rows by how they begin.
    """
    if bool((labels_BT[:, 1:] != IGNORE_INDEX).any()):
        return
    begins = [repr(tokenizer.decode(ids_T[:_SHOWN_TOKENS])) for ids_T in ids_BT]
    raise DataError(
        f"a batch without a single trained token; its rows begin with {'; '.join(begins)}. Were they tokenized "
        "with other settings? Delete tokenized_path and start again"
    )


def install_batches() -> None:
    """Check what LLaMA-Factory's collator puts together (0.9.5, data/collator.py; all stages share this one)."""
    collate = MultiModalDataCollatorForSeq2Seq.__call__

    @functools.wraps(collate)
    def collate_checked(self: Any, features: list[dict[str, Any]]) -> Any:
        batch = collate(self, features)
        if batch.get("labels") is not None:
            check_batch(batch["labels"], batch["input_ids"], self.tokenizer)
        return batch

    MultiModalDataCollatorForSeq2Seq.__call__ = collate_checked
