"""Installed packages against what this version of the project asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from afm.errors import install_advice
from afm.planning import Finding, Level

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_EXTRAS = ("sft", "rl", "rewards", "eval", "filters", "servers", "trackers", "dense")
_PROJECT = "afm"


def package_findings(asked: Sequence[str] | None = None) -> Iterator[Finding]:
    """One finding an extra: all there, something of another version, or absent.

    An extra whose first package is absent counts as not wanted; the GPU locks hold one engine each.

    Args:
        asked: Requirements with their markers; by default those of the installed project.
    """
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(line) for line in (asked or metadata.requires(_PROJECT) or ())]
    except (ImportError, metadata.PackageNotFoundError):
        yield Finding(
            Level.WARNING, "packages", "afm itself is not installed; pip install -e . in the checkout"
        )
        return
    for extra in ("", *_EXTRAS):
        wanted = [one for one in requirements if _belongs(one, extra) and one.name != _PROJECT]
        if wanted:
            yield _extra(extra, wanted)


def _belongs(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None:
        return not extra
    return requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""})


def _extra(extra: str, wanted: Sequence[Requirement]) -> Finding:
    found = {one.name: _version(one.name) for one in wanted}
    advice = install_advice(extra) if extra else "pip install -e . in the checkout"
    first = wanted[0].name
    if extra and not found[first]:
        return Finding(Level.WARNING, extra, f"{first} is absent; {advice}")
    wrong = [
        f"{one.name} {found[one.name] or 'absent'} (expected {one.specifier or 'any'})"
        for one in wanted
        if not one.specifier.contains(found[one.name] or "0", prereleases=True) or not found[one.name]
    ]
    if wrong:
        return Finding(Level.ERROR, extra or "packages", f"{', '.join(wrong)}; {advice}")
    told = ", ".join(f"{name} {version}" for name, version in found.items())
    return Finding(Level.OK, extra or "packages", told)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
