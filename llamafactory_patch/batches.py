"""The last check before a step: a batch holds something to learn.

Importing this module imports LLaMA-Factory; :func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
from typing import Any

from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
from llamafactory.extras.constants import IGNORE_INDEX

from afm.errors import DataError

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
