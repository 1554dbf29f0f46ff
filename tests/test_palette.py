"""Text in the colours of the palette can be read: contrast as WCAG 2.2 counts it, in light and dark."""

import colorsys
import re
from pathlib import Path

import pytest

import afm.evaluation
from afm.palette import PALETTE, ROLE_HUES, ROLE_STYLES

TEXT, BORDER = 4.5, 3.0
PAIRS = {
    "ink": ("page", "card", "tint", "env", "good-tint", "bad-tint", "warn-tint"),
    "soft": ("page", "card", "tint", "env"),
    "accent": ("page", "card", "tint"),
    "good": ("page", "card", "tint", "good-tint"),
    "bad": ("page", "card", "tint", "env", "bad-tint"),
    "warn": ("card", "warn-tint"),
}
ON_ROLES = ("ink", "soft", "bad", "code-word", "code-text", "code-number")
SHADES = Path(afm.evaluation.__file__).with_name("templates") / "palette.css.j2"


def rgb(colour):
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def luminance(colour):
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_text_can_be_read_on_its_background(mode):
    colours = {name: rgb(getattr(colour, mode)) for name, colour in PALETTE.items()}
    checks = [
        (f"{text} on {back}", TEXT, colours[text], colours[back])
        for text, backs in PAIRS.items()
        for back in backs
    ]
    lines = [name for name in PALETTE if name.startswith("series-")]
    checks += [(name, BORDER, colours[name], colours["card"]) for name in ("control", *lines)]
    shades = re.findall(r"--block-(\w+): ([\d.]+)%", SHADES.read_text())
    shades = dict(shades[:4] if mode == "light" else shades[4:])
    saturation = float(shades["s"]) / 100
    for hue in ROLE_HUES:
        back, edge, label = (
            colorsys.hls_to_rgb(hue / 360, float(shades[part]) / 100, saturation)
            for part in ("bg", "edge", "label")
        )
        checks.append((f"edge of role {hue}", BORDER, edge, back))
        checks += [(f"label of role {hue}", TEXT, label, back)]
        checks += [(f"{name} on role {hue}", TEXT, colours[name], back) for name in ON_ROLES]
    low = {
        name: round(contrast(text, back), 2)
        for name, least, text, back in checks
        if contrast(text, back) < least
    }
    assert low == {}


def test_each_role_has_a_colour_of_its_own_on_pages_and_in_the_terminal():
    assert len(ROLE_HUES) == len(set(ROLE_HUES)) == len(ROLE_STYLES) == len(set(ROLE_STYLES))
