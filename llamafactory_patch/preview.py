"""Numbers and examples of the training data: shown before the first step, and by ``afm mask`` without a training."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from afm.terminal import visible
from llamafactory_patch.compat import check_version
from llamafactory_patch.config import check_data, resolve
from llamafactory_patch.prompts import keep_record
from llamafactory_patch.statistics import (
    IGNORED,
    DataStatistics,
    Ids,
    count_tokens,
    sequence_sides,
    sequences,
)

STATISTICS_FILE = "data_statistics.json"
EXAMPLES_FILE = "data_examples.txt"

_SHOWN_CHARS = 300
_EXAMPLES = 3
STREAMED_ROWS = 256
"""A stream has no end to wait for; these of its rows are looked at."""


def install_preview() -> None:
    """Show the training data where LLaMA-Factory has made it (0.9.5, data/loader.py).

    ``train/*/workflow.py`` take ``get_dataset`` from ``llamafactory.data`` when they are first imported, so the
    name is replaced there, and in the workflows that are loaded already. Repeating it changes nothing.
    """
    import llamafactory.data as data

    if hasattr(data.get_dataset, "shows_data"):
        return
    showing = _showing(data.get_dataset)
    data.get_dataset = showing
    for name, module in list(sys.modules.items()):
        if re.fullmatch(r"llamafactory\.train\.\w+\.workflow", name):
            module.get_dataset = showing  # type: ignore[attr-defined]


def _showing(get_dataset: Any) -> Any:
    @functools.wraps(get_dataset)
    def get_and_show(
        template: Any, model_args: Any, data_args: Any, training_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        module = get_dataset(template, model_args, data_args, training_args, *args, **kwargs)
        first = training_args.process_index == 0
        keep_record(model_args, data_args, Path(training_args.output_dir), first=first)
        if first and (counts := data_args.asked.get("counts")):
            print(counts, flush=True)
        dataset = module.get("train_dataset")
        if first and dataset is not None:
            tokenizer = kwargs["tokenizer"] if "tokenizer" in kwargs else args[1]
            show_data(dataset, tokenizer, data_args.cutoff_len, Path(training_args.output_dir))
        return module

    get_and_show.shows_data = True  # type: ignore[attr-defined]
    return get_and_show


def show_data(dataset: Any, tokenizer: Any, cutoff_len: int, output_dir: Path) -> None:
    """Print the statistics and three examples; save both whole beside the model.

    Nothing is shown of rows that have no ids and labels.
    """
    rows = readable(dataset)
    if rows is None:
        return
    statistics = count_tokens(rows, tokenizer, cutoff_len, first_only=rows is not dataset)
    shown = list(examples(rows, statistics, _EXAMPLES))
    print(statistics_table(statistics), flush=True)
    for title, ids, labels in shown:
        print(f"{title}\n{visible(rendered(ids, labels, tokenizer, _SHOWN_CHARS))}\n", flush=True)
    output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(statistics), indent=2, ensure_ascii=False) + "\n"
    (output_dir / STATISTICS_FILE).write_text(text, encoding="utf-8")
    whole = [f"{title}\n{rendered(ids, labels, tokenizer)}\n" for title, ids, labels in shown]
    (output_dir / EXAMPLES_FILE).write_text("\n".join(whole), encoding="utf-8")


def readable(dataset: Any) -> Any:
    """Rows that can be read as often as wanted: of a stream the first; ``None`` when they are no ids and labels."""
    if not hasattr(dataset, "__len__"):
        from datasets import Dataset

        dataset = Dataset.from_list(list(dataset.take(STREAMED_ROWS)))
    return dataset if sequence_sides(dataset) else None


def statistics_table(statistics: DataStatistics) -> str:
    """The numbers as a person reads them."""
    low, middle, high, top = statistics.length_percentiles
    packed = f" in {statistics.rows:,} rows" if statistics.rows != statistics.sequences else ""
    subject = "beginning of the stream" if statistics.first_only else "training data"
    lines = [
        f"{subject}: {statistics.sequences:,} sequences{packed}, {statistics.tokens:,} tokens, "
        f"{_percent(statistics.trained, statistics.tokens)} trained on",
        f"  length: {low:,} to {top:,} tokens, median {middle:,}, 95 % up to {high:,}",
        f"  as long as cutoff_len ({statistics.cutoff_len:,}), so probably cut: {statistics.at_cutoff:,}",
        f"  equal to an earlier one: {statistics.duplicates:,}",
        f"  by tag, in {statistics.sampled:,} sequences:",
    ]
    total = sum(role.tokens for role in statistics.roles.values())
    for name, role in statistics.roles.items():
        share = f"{_percent(role.tokens, total):>7} of the tokens"
        lines.append(f"    {name:<18} {share}, {_percent(role.trained, role.tokens):>7} of them trained on")
    return "\n".join(lines)


def rendered(ids: Ids, labels: Ids, tokenizer: Any, max_chars: int | None = None) -> str:
    """Decoded tokens; what has no loss stands in ⟦ ⟧. Longer stretches than ``max_chars`` lose their middle."""
    parts = []
    pairs = zip(ids.tolist(), (labels != IGNORED).tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        text = _shortened(tokenizer.decode([token for token, _ in run]), max_chars)
        parts.append(text if trained else f"⟦{text}⟧")
    return "".join(parts)


def examples(dataset: Any, statistics: DataStatistics, count: int) -> Iterator[tuple[str, Ids, Ids]]:
    """The first sequence, one from the middle, the first of the longest, and as many more as ``count`` asks for."""
    longest = next(
        number
        for number, (ids, _) in enumerate(sequences(dataset))
        if len(ids) == statistics.length_percentiles[-1]
    )
    total = statistics.sequences
    chosen = dict.fromkeys((0, total // 2, longest, *range(min(count, total))))
    for number in sorted(islice(chosen, count)):
        ids, labels = next(islice(sequences(dataset), number, None))
        title = f"--- sequence {number + 1}: {len(ids):,} tokens; ⟦no loss⟧"
        yield title, ids, labels


def _shortened(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


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
