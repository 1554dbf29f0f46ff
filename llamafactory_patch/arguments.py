"""The options this package adds to LLaMA-Factory's data arguments.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llamafactory.hparams import parser
from llamafactory.hparams.data_args import DataArguments

from afm.masking import Boundary

MASKING_REVISION = 1
"""Counts changes of the masking itself: data sets cached or stored by another revision are not reused."""


@dataclass
class AgentDataArguments(DataArguments):
    """LLaMA-Factory's data arguments and the author mask."""

    ignore_observation: bool = field(
        default=False,
        metadata={"help": "No loss on what the environment wrote into the assistant's turns."},
    )
    ignore_observation_token: str = field(
        default="observation",
        metadata={"help": "Tag between which the environment writes; commas separate several."},
    )
    observation_boundary: Literal["split", "mask", "keep"] = field(
        default="split",
        metadata={
            "help": "A token over the border of an observation: `split` makes there be none (equals rollouts), "
            "`mask` takes no loss on it, `keep` does; the latter two tokenize like LLaMA-Factory without masks."
        },
    )
    match_chat_template: bool = field(
        default=False,
        metadata={
            "help": "Refuse to train when `template` renders a question otherwise than the tokenizer's own "
            "chat template, which rollouts use."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for tag in self.observation_tags:
            if not re.fullmatch(r"[^\s<>/]+", tag):
                raise ValueError(
                    f"ignore_observation_token: {tag!r} is no tag name; expected a name without brackets, or "
                    f"several with commas between, got {self.ignore_observation_token!r}"
                )
        if self.observation_boundary not in (boundaries := [str(boundary) for boundary in Boundary]):
            raise ValueError(
                f"observation_boundary: got {self.observation_boundary!r}, expected one of {boundaries}"
            )
        if self.ignore_observation and self.train_on_prompt:
            raise ValueError("ignore_observation trains on the agent's text only; switch train_on_prompt off")
        if self.tokenized_path is not None and _holds_data(Path(self.tokenized_path)):
            self._check_stored_masking(Path(self.tokenized_path))

    @property
    def observation_tags(self) -> tuple[str, ...]:
        """Names of the tags between which the environment writes."""
        return tuple(tag.strip() for tag in self.ignore_observation_token.split(","))

    def masking_settings(self) -> dict[str, Any]:
        """What the labels of a tokenized data set depend on."""
        if not self.ignore_observation:
            return {"ignore_observation": False}
        return {
            "ignore_observation": True,
            "tags": list(self.observation_tags),
            "boundary": self.observation_boundary,
            "revision": MASKING_REVISION,
        }

    def store_masking(self) -> None:
        """Write beside ``tokenized_path`` how the data stored there is masked."""
        if self.tokenized_path is None:
            return
        path = _masking_file(Path(self.tokenized_path))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.masking_settings()), encoding="utf-8")
        temporary.replace(path)

    def _check_stored_masking(self, tokenized: Path) -> None:
        """LLaMA-Factory loads a stored data set whatever the other options say; refuse another mask."""
        path = _masking_file(tokenized)
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if stored is None and not self.ignore_observation:
            return
        if stored != self.masking_settings():
            raise ValueError(
                f"tokenized_path: the data set in {tokenized} was masked as {stored or 'unknown'}, this run asks "
                f"for {self.masking_settings()}; delete the folder or name another"
            )


def _holds_data(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _masking_file(tokenized: Path) -> Path:
    return tokenized.with_name(f"{tokenized.name}.masking.json")


def install_arguments() -> None:
    """Make LLaMA-Factory parse :class:`AgentDataArguments`.

    Its parser takes the classes of the arguments from module lists (0.9.5, hparams/parser.py line 47);
    unknown keys are still refused, since the parser knows exactly these classes.
    """
    lists = (parser._TRAIN_ARGS, parser._INFER_ARGS, parser._EVAL_ARGS, parser._TRAIN_MCA_ARGS)
    for classes in lists:
        for index, found in enumerate(classes):
            if found is DataArguments:
                classes[index] = AgentDataArguments
    if AgentDataArguments not in parser._TRAIN_ARGS:
        raise RuntimeError("LLaMA-Factory's list of training arguments has no DataArguments to replace")
