"""The models of an evaluation, before it runs: the one that answers, and the judges that choose or judge again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from afm.agents import model_folder
from afm.evaluation.config import EvalConfig
from afm.evaluation.measures import Method
from afm.models.load import served_by_all
from afm.models.replicas import addresses
from afm.planning import Finding, Level, Report, missing_model_files, model_shape
from afm.rewards.judge_endpoint import JudgeEndpoint
from afm.settings import load_settings
from afm.tools.health import unanswered


def model_findings(config: EvalConfig, wanted: int | None) -> list[Finding]:
    """What can be said of the model without loading it; ``wanted``: tokens of the longest response."""
    report = Report()
    folder = config.answering.folder
    context = (
        report.asked("model", lambda: _served(config, report))
        if folder is None
        else report.asked("model", lambda: _folder(folder, report))
    )
    room = config.answering.context_tokens or context
    if room and wanted:
        fits = wanted < room
        text = f"an episode has up to {wanted:,} tokens after its prompt, the model {room:,} in all"
        advice = "" if fits else "; lower limits.max_response_tokens, or serve it with more positions"
        report.add(Finding(Level.OK if fits else Level.WARNING, "context", text + advice))
    return report.findings


def _folder(folder: Path, report: Report) -> int | None:
    if not folder.is_dir():
        report.add(
            Finding(Level.ERROR, "model", f"{folder}: no such folder; train one, or name a server: model=URL")
        )
        return None
    whole = model_folder(folder)
    if missing := missing_model_files(whole):
        text = f"{whole}: without {', '.join(missing)}; copy the whole model"
        report.add(Finding(Level.ERROR, "model", text))
        return None
    shape = model_shape(str(whole))
    size = f", {shape.parameters / 1e6:,.1f} M parameters" if shape else ""
    report.add(Finding(Level.OK, "model", f"{whole}: configuration, weights and tokenizer{size}"))
    return shape.max_positions if shape else None


def _served(config: EvalConfig, report: Report) -> int | None:
    """The context that the server tells."""
    if config.answering.chat is None:
        report.add(*_tokenizer(config))
    secret = load_settings().afm_model_api_key
    key = secret.get_secret_value() if secret is not None else None
    served = served_by_all(addresses(config.answering.path), key)
    name = config.answering.name or (next(iter(served)) if len(served) == 1 else None)
    if name is None:
        text = f"{config.answering.path} serves {', '.join(sorted(served))}; choose with model.name=NAME"
        report.add(Finding(Level.ERROR, "model", text))
        return None
    if name not in served:
        text = f"{config.answering.path} serves no {name!r}, but {', '.join(sorted(served)) or 'nothing'}; mend model.name"
        report.add(Finding(Level.ERROR, "model", text))
        return None
    report.add(Finding(Level.OK, "model", f"{name} answers at {config.answering.path}"))
    return served[name].context_tokens


def _tokenizer(config: EvalConfig) -> Iterator[Finding]:
    where = config.answering.tokenizer
    if where is None:
        yield Finding(Level.ERROR, "model", "a server needs its tokenizer here; give model.tokenizer=DIR")
    elif not (model_folder(where) / "tokenizer.json").is_file():
        yield Finding(Level.ERROR, "model", f"{where}: no tokenizer.json; give the model's own folder")


def further_judges(config: EvalConfig, questions: int) -> Iterator[Finding]:
    """What ``best_of`` and ``agreement`` need: rounds, an endpoint that answers, and its key."""
    best_of, why_not = config.choosing()
    if why_not:
        yield Finding(Level.WARNING, "best_of", f"left out: {why_not}")
    if best_of is not None:
        graded = config.rounds if Method.SCORE in best_of.methods else 0
        listed = sum(config.rounds // k for k in best_of.sizes) if Method.LIST in best_of.methods else 0
        yield from _endpoint("best_of", best_of.judge, questions * (graded + listed))
    again, why_not = config.agreeing()
    if why_not:
        yield Finding(Level.WARNING, "agreement", f"left out: {why_not}")
    if again is not None:
        episodes = min(again.episodes or questions * config.rounds, questions * config.rounds)
        for judge in again.judges:
            calls = episodes * again.repeats * (2 if judge.control else 1)
            yield from _endpoint("agreement", judge, calls)


def _endpoint(subject: str, judge: JudgeEndpoint, calls: int) -> Iterator[Finding]:
    place = judge.place()
    if place.url is None:
        return
    text = f"{place.model} at {place.url}, at most {calls:,} calls"
    if place.api_key is None:
        advice = f"export {judge.key_variable} if it needs one"
        yield Finding(Level.WARNING, subject, f"{text}, asked without a key; {advice}")
    else:
        yield Finding(Level.OK, subject, text)
    if why_not := asyncio.run(unanswered(place.url)):
        # Episodes and scores are there by then, and `afm eval choose` or `agree` makes up for it.
        told = f"nobody answers at {place.url} ({why_not}); start it, or mend its address"
        yield Finding(Level.ERROR, subject, told)
