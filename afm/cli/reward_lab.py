"""``afm reward --attack``: the table of attacks on a reward."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from afm.errors import UsageError, suggestion

if TYPE_CHECKING:
    from afm.rewards.attack_lab import Attack, Outcome

_SHOWN_EVIDENCE = 100


def run_lab(config: Path | None, scorers: Sequence[str], as_json: bool) -> None:
    """Try every attack on the reward that ``config`` describes, and print what each got.

    Raises:
        UsageError: No attack is made on one of ``scorers``.
        Exit: With status 1, when one got something else than it deserves.
    """
    from afm.rewards.attack_lab import shipped_attacks

    attacks = shipped_attacks()
    known = {attack.scorer for attack in attacks}
    for name in scorers:
        if name not in known:
            raise UsageError(f"--scorer {name}: no attacks on it; {suggestion(name, known)}")
    chosen = [attack for attack in attacks if not scorers or attack.scorer in scorers]
    counts = asyncio.run(_tried(config, chosen, as_json))
    if not as_json:
        print(
            f"{len(chosen)} attacks: "
            + ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        )
    if set(counts) != {"ok"}:
        raise typer.Exit(1)


async def _tried(config: Path | None, attacks: Sequence[Attack], as_json: bool) -> Counter[str]:
    from afm.rewards import load_reward
    from afm.rewards.attack_lab import outcomes

    reward = load_reward(config)
    counts: Counter[str] = Counter()
    width = max(len(attack.name) for attack in attacks)
    if not as_json:
        print(f"{'scorer':<12} {'attack':<{width}} {'deserves':>8} {'got':>9}  result")
    try:
        async for outcome in outcomes(reward, attacks):
            counts[_word(outcome)] += 1
            print(_as_json(outcome) if as_json else _as_text(outcome, width), flush=True)
    finally:
        await reward.close()
    return counts


def _word(outcome: Outcome) -> str:
    if outcome.passed:
        return "ok"
    if outcome.got is None:
        return "abstained"
    return "paid" if outcome.got > outcome.attack.deserves else "underpaid"


def _as_json(outcome: Outcome) -> str:
    attack = outcome.attack
    row = {"scorer": attack.scorer, "attack": attack.name, "part": attack.part, "deserves": attack.deserves}
    row |= {"got": outcome.got, "result": _word(outcome), "evidence": outcome.evidence}
    return json.dumps(row | {"seconds": round(outcome.seconds, 6)})


def _as_text(outcome: Outcome, width: int) -> str:
    attack = outcome.attack
    got = "-" if outcome.got is None else f"{outcome.got:g}"
    row = f"{attack.scorer:<12} {attack.name:<{width}} {attack.deserves:>8g} {got:>9}  {_word(outcome)}"
    if outcome.passed:
        return row
    from afm.tools.screen import plain

    return f"{row}: {' '.join(plain(outcome.evidence).split())[:_SHOWN_EVIDENCE]}"
