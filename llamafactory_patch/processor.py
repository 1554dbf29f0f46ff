"""LLaMA-Factory's data processors with the author mask, and how they get into its data pipeline.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from llamafactory.data import loader
from llamafactory.data.processor import PackedSupervisedDatasetProcessor, SupervisedDatasetProcessor
from llamafactory.extras.constants import IGNORE_INDEX

from afm.errors import DataError, TrajectoryError
from afm.masking import Boundary
from llamafactory_patch.arguments import MASKING_REVISION, AgentDataArguments
from llamafactory_patch.authors import AuthorTemplate, check_chat_template, ids_and_labels
from llamafactory_patch.spans import segments_by_tag

ROW_COLUMN = "_row"
"""Where a row came from, as ``file:line``; travels beside LLaMA-Factory's own columns until tokenization."""

_ERRORS_SHOWN = 5


class _AuthorMask:
    """Mixed into a supervised processor: labels only on what the agent wrote.

    It extends ``__init__`` and not ``__post_init__``, which the stock dataclass never calls: the mask would
    silently do nothing while the loss falls as usual.
    """

    template: Any
    tokenizer: Any
    data_args: AgentDataArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masking_revision = MASKING_REVISION  # part of the fingerprint of the cached data set
        if self.data_args.match_chat_template:
            check_chat_template(self.template, self.tokenizer)
        if self.data_args.ignore_observation:
            boundary = Boundary(self.data_args.observation_boundary)
            self.template = AuthorTemplate(self.template, self.data_args.observation_tags, boundary)

    def preprocess_dataset(self, examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Token ids and labels of a batch of rows.

        Raises:
            DataError: Rows whose observations are broken, or that leave nothing to train on; each is named.
        """
        template = self.template
        if not isinstance(template, AuthorTemplate):
            return super().preprocess_dataset(examples)  # type: ignore
        _refuse_broken_rows(examples, self.data_args.observation_tags)
        self._names = [_row_name(examples, index) for index in range(len(examples["_prompt"]))]
        try:
            self._encode_ahead(template, examples)
            self._next_row = 0
            return super().preprocess_dataset(examples)  # type: ignore
        finally:
            template.forget()

    def _encode_ahead(self, template: AuthorTemplate, examples: Mapping[str, Sequence[Any]]) -> None:
        """Encode the texts of the whole batch in few calls of the tokenizer: most of the time goes there."""
        author_tokenizer = template.collect(self.tokenizer)
        for index in range(len(examples["_prompt"])):
            if any(examples[media][index] for media in ("_images", "_videos", "_audios")):
                continue  # loading media twice would cost more than it saves
            template.encode_multiturn(
                self.tokenizer,
                [*examples["_prompt"][index], *examples["_response"][index]],
                examples["_system"][index],
                examples["_tools"][index],
                self.data_args.mask_history and not template.preserve_thinking,
            )
        author_tokenizer.encode_collected()

    def _encode_data_example(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        input_ids, labels = super()._encode_data_example(*args, **kwargs)  # type: ignore
        if not isinstance(self.template, AuthorTemplate):
            return input_ids, labels
        input_ids, labels = ids_and_labels(input_ids, labels, IGNORE_INDEX)
        row = self._next_row
        self._next_row += 1
        if all(label == IGNORE_INDEX for label in labels):
            raise DataError(
                "nothing to train on: no token of the agent is left within cutoff_len="
                f"{self.data_args.cutoff_len}; raise it or drop the row",
                path=self._names[row],
            )
        return input_ids, labels


class AgentSupervisedProcessor(_AuthorMask, SupervisedDatasetProcessor):
    """One row, one sequence."""


class AgentPackedProcessor(_AuthorMask, PackedSupervisedDatasetProcessor):
    """Several rows in one sequence (``packing``, ``neat_packing``)."""


_MASKED = {
    SupervisedDatasetProcessor: AgentSupervisedProcessor,
    PackedSupervisedDatasetProcessor: AgentPackedProcessor,
}


def install_processor() -> None:
    """Put the masking processors into LLaMA-Factory's data loader (0.9.5, data/loader.py).

    Two functions of that module are wrapped, since it has no registry: ``_get_dataset_processor`` chooses
    the processor, ``_load_single_dataset`` is where rows still stand in the order of their file.
    """
    loader._get_dataset_processor = _masking(loader._get_dataset_processor)
    loader._load_single_dataset = _naming_rows(loader._load_single_dataset)


def _masking(choose: Any) -> Any:
    @functools.wraps(choose)
    def choose_masking(
        data_args: Any, stage: str, template: Any, tokenizer: Any, processor: Any, do_generate: bool = False
    ) -> Any:
        stock = choose(data_args, stage, template, tokenizer, processor, do_generate)
        if not isinstance(data_args, AgentDataArguments) or do_generate:
            return stock
        data_args.store_masking()
        masked = _MASKED.get(type(stock))
        if masked is not None:
            return masked(template=template, tokenizer=tokenizer, processor=processor, data_args=data_args)
        if data_args.ignore_observation:
            raise ValueError(f"ignore_observation works in stage 'sft', got stage {stage!r}")
        return stock

    return choose_masking


def _naming_rows(load: Any) -> Any:
    @functools.wraps(load)
    def load_with_names(dataset_attr: Any, model_args: Any, data_args: Any, training_args: Any) -> Any:
        dataset = load(dataset_attr, model_args, data_args, training_args)
        if not getattr(data_args, "ignore_observation", False) or not isinstance(dataset, Dataset):
            return dataset
        source = dataset_attr.dataset_name
        if dataset_attr.load_from == "file":
            source = str(Path(data_args.dataset_dir) / source)
        if dataset_attr.num_samples is not None:  # drawn at random: the position tells nothing
            return dataset.add_column(ROW_COLUMN, [source] * len(dataset))
        number = "{}:{}" if source.endswith(".jsonl") else "{}, row {}"
        return dataset.add_column(ROW_COLUMN, [number.format(source, n + 1) for n in range(len(dataset))])

    return load_with_names


def _row_name(examples: Mapping[str, Sequence[Any]], index: int) -> str:
    source = examples[ROW_COLUMN][index] if ROW_COLUMN in examples else f"row {index + 1} of its batch"
    turns = [*examples["_prompt"][index], *examples["_response"][index]]
    return f"{source} ({turns[0]['content'][:40]!r})" if turns else source


def _refuse_broken_rows(examples: Mapping[str, Sequence[Any]], tags: Sequence[str]) -> None:
    faults: list[DataError] = []
    for index, (prompt, response) in enumerate(zip(examples["_prompt"], examples["_response"], strict=True)):
        try:
            if len(prompt) % 2 != 1 or len(response) != 1:
                raise DataError("expected turns of user and assistant in alternation, the assistant's last")
            for message in (*prompt[1::2], *response):
                segments_by_tag(message["content"], tags)
        except (DataError, TrajectoryError) as fault:
            faults.append(DataError(fault.message, path=_row_name(examples, index)))
    if faults:
        more = f"\n... and {len(faults) - _ERRORS_SHOWN} more rows" if len(faults) > _ERRORS_SHOWN else ""
        raise DataError("\n".join(str(fault) for fault in faults[:_ERRORS_SHOWN]) + more)
