"""What a configuration would train on, shown row by row without a training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from afm.terminal import visible
from llamafactory_patch.compat import check_version
from llamafactory_patch.config import check_data, resolve
from llamafactory_patch.statistics import IGNORED, Ids, count_tokens


def show_examples(
    config_path: str | Path, overrides: Sequence[str], count: int, *, as_json: bool = False
) -> None:
    """Print the statistics of the training data and ``count`` sequences of it whole, as the trainer gets them.

    The data goes the way of a training, whatever its layout, packing and stage, so LLaMA-Factory is imported. The first
    sequence, one from the middle, the longest and then those after the first are shown.

    Args:
        as_json: Print one object for the statistics and one for each sequence (``tokens``, ``trained``,
            ``trained_text``, ``masked_text``) instead.

    Raises:
        ConfigError: The configuration is wrong, or its data is missing.
        DataError: A row cannot be trained on.
    """
    job = resolve(config_path, overrides)
    check_version()
    check_data(job)
    from llamafactory_patch.plugin import install

    install()
    from llamafactory_patch.preview import examples, readable, rendered, statistics_table
    from llamafactory_patch.rehearsal import engine_arguments, training_rows

    arguments = engine_arguments(job.config)
    dataset, tokenizer = training_rows(arguments)
    rows = readable(dataset)
    if rows is None:
        print("nothing to show: these rows have no labels")
        return
    statistics = count_tokens(rows, tokenizer, arguments.data.cutoff_len, first_only=rows is not dataset)
    print(json.dumps(asdict(statistics), ensure_ascii=False) if as_json else statistics_table(statistics))
    if not as_json and (counts := arguments.data.asked.get("counts")):
        print(f"  {counts}")
    for title, ids, labels in examples(rows, statistics, count):
        if as_json:
            print(json.dumps(_row(ids, labels, tokenizer), ensure_ascii=False))
        else:
            print(f"\n{title}\n{visible(rendered(ids, labels, tokenizer))}")


def _row(ids: Ids, labels: Ids, tokenizer: Any) -> dict[str, Any]:
    trained = labels != IGNORED
    return {
        "tokens": len(ids),
        "trained": int(trained.sum()),
        "trained_text": tokenizer.decode(ids[trained].tolist()),
        "masked_text": tokenizer.decode(ids[~trained].tolist()),
    }
