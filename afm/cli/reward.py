"""``afm reward``: score responses, and attack the scorers."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import (
    TrustOption,
    agent_option,
    configs_folder,
    file_argument,
    file_option,
    lines_file,
    reward_beside,
)
from afm.errors import AfmError, ConfigError, DataError, RepeatedErrors, UsageError, json_word, suggestion
from afm.terminal import plain, plural

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.rewards import Sample, Verdict
    from afm.rewards.attack_suite import Attack, Outcome
    from afm.trajectory.record import Record


_PARALLEL = 64
_SHOWN_EVIDENCE = 100


def reward(
    file: Annotated[
        Path | None,
        file_argument(
            "JSONL of {data_source, question, response, ground_truth, extra_info}, or trajectories; with --attack "
            "the questions of attacks on --rewards, or a reward YAML."
        ),
    ] = None,
    agent: Annotated[str, typer.Option(help="Agent of rows without one: shipped agent or YAML.")] = "math",
    rewards: Annotated[
        Path | None,
        file_option(
            "Reward YAML, for example configs/rewards/math.yaml [default: the scorer of each row's data_source]."
        ),
    ] = None,
    attack: Annotated[
        bool, typer.Option("--attack", help="Attack the reward instead of scoring a file.")
    ] = False,
    scorer: Annotated[
        list[str] | None,
        typer.Option(help="With --attack: scorer to attack; may be repeated [default: all]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
    trust: TrustOption = False,
) -> None:
    """Score every response in FILE, with verdict and evidence.

    The verdict is correct, wrong or abstained, or unjudged if only other parts of the score could be judged. Bad rows
    are reported with file and line, and the others are scored. The exit status is 1 if a row is bad or a verdict
    could not be reached. With --attack the command prints the score that each attack deserves and the score that it
    gets. The exit status is then 1 if they differ.

    The shipped attacks test the shipped scorers. Attacks on a scorer of your own are made from the questions and gold
    answers in FILE: afm reward --attack FILE --rewards YAML

    Example: afm reward runs/quickstart/eval_rl/episodes.jsonl --agent math
    """
    if attack:
        config = file if file is not None and file.suffix in (".yaml", ".yml") else None
        if config is not None and rewards is not None:
            raise UsageError(f"--attack takes one reward YAML, got {config} and --rewards {rewards}")
        own = _attacks_of(file, agent, rewards) if file is not None and config is None else None
        try_attacks(config or rewards, scorer or (), as_json, own)
        return
    if file is None:
        raise UsageError(
            "FILE is missing; give a JSONL of responses: afm reward FILE, or attack: afm reward --attack"
        )
    if scorer:
        raise UsageError("--scorer goes with --attack: afm reward --attack --scorer NAME")
    lines_file()(file)
    _agent(agent)
    counts = asyncio.run(_judge_file(file, agent, rewards, as_json))
    if not counts:
        raise DataError("holds no rows", path=str(file))
    if not as_json:
        print(_summary("row", counts))
    if counts["bad"] or counts["abstained"]:
        raise typer.Exit(1)


def _summary(what: str, counts: Counter[str]) -> str:
    return f"{plural(counts.total(), what)}: " + ", ".join(
        f"{counts[word]} {word}" for word in sorted(counts)
    )


@cache
def _agent(name: str) -> AgentSpec:
    return agent_option(name)


async def _judge_file(file: Path, agent: str, rewards: Path | None, as_json: bool) -> Counter[str]:
    from afm.rewards import load_reward
    from afm.rewards.base import in_order

    log = logging.getLogger("afm.rewards")
    log.setLevel(logging.ERROR)  # each row says below why it has no score
    judge, repeats = load_reward(rewards), RepeatedErrors()
    counts: Counter[str] = Counter()

    async def verdict(row: tuple[int, str]) -> tuple[int, Verdict | AfmError]:
        number, line = row
        try:
            sample = _sample(line, agent, file, rewards)
            known = rewards is not None or sample.extra_info.get("reward")
            if not known and (text := reward_beside(sample.data_source, file)):
                raise DataError(text)
            return number, await judge.score(sample)
        except (DataError, ValueError) as error:
            return number, error if isinstance(error, AfmError) else DataError(str(error))

    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            rows = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            async for number, result in in_order(verdict, rows, _PARALLEL, ahead=_PARALLEL):
                word = _word(result)
                counts[word] += 1
                if as_json:
                    print(_as_json(number, result), flush=True)
                elif not isinstance(result, AfmError) or repeats.is_new(result):
                    print(_as_text(file, number, word, result), flush=True)
    finally:
        log.setLevel(logging.NOTSET)
        await judge.close()
    for line in [] if as_json else repeats.rest():
        print(line)
    return counts


def _sample(line: str, agent: str, file: Path, rewards: Path | None) -> Sample:
    from afm.configuration import validated
    from afm.rewards import Sample
    from afm.rewards.base import ResponseRow
    from afm.trajectory import author_segments
    from afm.trajectory.io import convert_advice, json_fault, questions_advice, record_of_line

    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"invalid JSON: {json_fault(error)}; expected one JSON object per line. Correct the line, or remove it"
        ) from None
    if not isinstance(data, dict):
        raise DataError(f"got {json_word(data)}, expected an object")
    if "segments" in data:
        return _sample_of_record(record_of_line(line.encode(), file), agent, file, rewards)
    required = [key for key, field in ResponseRow.model_fields.items() if field.is_required()]
    if missing := [key for key in required if key not in data]:
        advice = f"afm reward --help lists the keys. If the rows are a log, {convert_advice(file)}"
        raise DataError(
            f"got an object with {', '.join(sorted(data)[:6])}, expected one with {', '.join(missing)} too; "
            + (questions_advice(file, data) or advice)
        )
    row = validated(ResponseRow, data, "row")
    spec = _agent(row.agent or agent)
    return Sample(
        spec=spec,
        data_source=row.data_source,
        question=row.question or "",
        segments=author_segments(row.response, spec),
        ground_truth=row.ground_truth,
        agent_tokens=row.agent_tokens,
        response_tokens=row.response_tokens,
        extra_info=row.extra_info or {},
    )


def _sample_of_record(record: Record, agent: str, file: Path, rewards: Path | None) -> Sample:
    from afm.rewards import Sample

    extra_info = record.provenance.get("extra_info", {})
    if rewards is None and not (record.data_source or extra_info.get("reward")):
        config = configs_folder() / "filters/logs.yaml"
        raise DataError(
            "got a trajectory without data_source and ground_truth, as in logs; add both (`afm list rewards` "
            "prints the sources), or filter without them: "
            f"afm data filter {quote(str(file))} --config {quote(str(config))} --output-dir DIR"
        )
    spec = _agent(agent)
    if spec.name != record.agent:
        spec = _agent(record.agent)
    return Sample.of(spec, record, record.segments, extra_info=extra_info)


def _word(result: Verdict | AfmError) -> str:
    if isinstance(result, AfmError):
        return "bad"
    if result.score is None:
        return "abstained"
    return {None: "unjudged", 1.0: "correct"}.get(result.parts.get("correct"), "wrong")


def _as_json(line: int, result: Verdict | AfmError) -> str:
    if isinstance(result, AfmError):
        return json.dumps({"line": line, "error": str(result)})
    row = {"line": line, "score": result.score, "verdict": _word(result), "parts": result.parts}
    row |= {"evidence": result.evidence, "seconds": round(result.seconds, 6)}
    return json.dumps(row)


def _as_text(file: Path, line: int, word: str, result: Verdict | AfmError) -> str:
    """One line, whatever control characters the response put into it."""
    if isinstance(result, AfmError):
        text = str(result)
    else:
        score = "-" if result.score is None else f"{result.score:g}"
        text = f"{word}, score {score}: {result.evidence or 'no remark'}"
    return f"{file}:{line}: {_on_one_line(text)}"


def _on_one_line(text: str) -> str:
    return " ".join(plain(text).split())


def _attacks_of(file: Path, agent: str, rewards: Path | None) -> list[Attack]:
    """Return attacks made of the rows in ``file``.

    Raises:
        DataError: A row is wrong. The message has file and line.
    """
    from afm.rewards.attack_suite import attacks_on

    lines_file()(file)
    _agent(agent)
    samples = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                samples += [_sample(line, agent, file, rewards)] if line.strip() else []
            except (DataError, ConfigError) as error:
                raise DataError(str(error), path=str(file), line=number) from None
    if not samples:
        raise DataError("holds no rows; add a row for each question", path=str(file))
    return list(attacks_on(samples))


def try_attacks(
    config: Path | None, scorers: Sequence[str], as_json: bool, own: Sequence[Attack] | None = None
) -> None:
    """Try every attack on the reward that ``config`` describes, and print its score.

    Args:
        own: Attacks to try in place of the shipped ones.

    Raises:
        UsageError: No attack is made on one of ``scorers``.
        Exit: With status 1, if an attack did not get the reward that it deserves.
    """
    from afm.rewards.attack_suite import shipped_attacks

    attacks = shipped_attacks() if own is None else own
    known = {attack.scorer for attack in attacks}
    for name in scorers:
        if name not in known:
            raise UsageError(f"--scorer {name}: no attacks on it; {suggestion(name, known)}")
    chosen = [attack for attack in attacks if not scorers or attack.scorer in scorers]
    counts = asyncio.run(_try_attacks(config, chosen, as_json))
    if not as_json:
        print(_summary("attack", counts))
    if set(counts) != {"ok"}:
        raise typer.Exit(1)


async def _try_attacks(config: Path | None, attacks: Sequence[Attack], as_json: bool) -> Counter[str]:
    from afm.rewards import load_reward
    from afm.rewards.attack_suite import outcomes

    reward = load_reward(config)
    tried = {attack.data_source.lower() for attack in attacks}
    for source, name in reward.settings.by_source.items():
        if "." in name and not any(fnmatchcase(each, source.lower()) for each in tried):
            text = (
                f"not attacked: {name} (data_source {source}), your own; attacks on it are made of your rows"
            )
            print(f"{text}: afm reward --attack ROWS.jsonl --rewards {config} --agent AGENT", file=sys.stderr)
    counts: Counter[str] = Counter()
    width = max(len(attack.name) for attack in attacks)
    if not as_json:
        print(f"{'scorer':<12} {'attack':<{width}} {'deserves':>8} {'got':>9}  result")
    try:
        async for outcome in outcomes(reward, attacks):
            counts[_outcome_word(outcome)] += 1
            print(_outcome_json(outcome) if as_json else _outcome_line(outcome, width), flush=True)
    finally:
        await reward.close()
    return counts


def _outcome_word(outcome: Outcome) -> str:
    if outcome.passed:
        return "ok"
    if outcome.got is None:
        return "abstained"
    return "paid" if outcome.got > outcome.attack.deserves else "underpaid"


def _outcome_json(outcome: Outcome) -> str:
    attack = outcome.attack
    row = {"scorer": attack.scorer, "attack": attack.name, "part": attack.part, "deserves": attack.deserves}
    row |= {"got": outcome.got, "result": _outcome_word(outcome), "evidence": outcome.evidence}
    return json.dumps(row | {"seconds": round(outcome.seconds, 6)})


def _outcome_line(outcome: Outcome, width: int) -> str:
    attack = outcome.attack
    got = "-" if outcome.got is None else f"{outcome.got:g}"
    row = (
        f"{attack.scorer:<12} {attack.name:<{width}} {attack.deserves:>8g} {got:>9}  {_outcome_word(outcome)}"
    )
    return row if outcome.passed else f"{row}: {_on_one_line(outcome.evidence)[:_SHOWN_EVIDENCE]}"
