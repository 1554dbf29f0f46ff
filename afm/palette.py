"""The table of colours for the viewer, reports, charts and the terminal.

Pages get it as CSS properties (``--good``, ``--series-1``, ...) from ``evaluation/templates/palette.css.j2``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """The colour of one meaning.

    Attributes:
        light: On light pages, as CSS.
        dark: On dark pages, as CSS.
        terminal: A style of Rich, made of the terminal's own colours, which suit its background.
    """

    light: str
    dark: str
    terminal: str = ""


PALETTE = {
    "page": Colour("#f6f7f9", "#10141a"),
    "card": Colour("#ffffff", "#181e26"),
    "ink": Colour("#1c2330", "#e6eaf0"),
    "soft": Colour("#5b6675", "#9aa6b5", "dim"),
    "line": Colour("#dfe3e9", "#2b333e"),
    "control": Colour("#7f8a99", "#66717f"),
    "accent": Colour("#2458d3", "#7aa8ff", "cyan"),
    "tint": Colour("#eaf0fd", "#1c2a45"),
    "good": Colour("#0b7a4b", "#5cd6a0", "green"),
    "good-tint": Colour("#e2f5ec", "#12332a"),
    "warn": Colour("#8a5a00", "#f2b04a", "yellow"),
    "warn-tint": Colour("#fdf1d9", "#3a2c10"),
    "bad": Colour("#b3261e", "#ff938a", "bold red"),
    "bad-tint": Colour("#fdeceb", "#3d1d1c"),
    "env": Colour("#f1f3f5", "#20262f"),
    "env-line": Colour("#98a2b0", "#6b7686"),
    "code-word": Colour("#8a2ea6", "#d2a0ff", "magenta"),
    "code-text": Colour("#0b6e4f", "#8fd6a8"),
    "code-number": Colour("#a04a00", "#f0b27a"),
    "series-1": Colour("#2563eb", "#7aa8ff"),
    "series-2": Colour("#d97706", "#f2b04a"),
    "series-3": Colour("#0f8a6d", "#4ccfa9"),
    "series-4": Colour("#9333ea", "#c99bff"),
    "series-5": Colour("#be185d", "#f78bb8"),
}
"""Colours by name. ``control`` is the border of controls and inputs. ``series-*`` are the lines of charts in
their order. A ``*-tint`` is the background of text in its colour."""

ROLE_HUES = (222, 272, 165, 36, 312, 196, 92, 18, 244, 142, 54, 342)
"""CSS hues of roles. Further roles start again with the first hue."""
ROLE_STYLES = (
    *("blue", "magenta", "green", "yellow", "bright_magenta", "cyan"),
    *("bright_green", "red", "bright_blue", "bright_cyan", "bright_yellow", "bright_red"),
)
"""The terminal's own colours nearest to :data:`ROLE_HUES`, as styles of Rich."""


def terminal_style(name: str) -> str:
    """Return the Rich style of a colour.

    Raises:
        KeyError: The palette does not have this name.
    """
    return PALETTE[name].terminal
