"""Colours of kept shares, for light and dark pages: text on every shade has a contrast of 4.5 or more (WCAG AA)."""

from __future__ import annotations

from itertools import pairwise

from deployments.inspection.inspected import LEVELS

Rgb = tuple[int, int, int]

# Lightness alone tells the shades apart, also for those who see no hues.
_LIGHT_STOPS: tuple[Rgb, ...] = ((233, 245, 225), (158, 217, 189), (63, 167, 189), (20, 72, 127))
_DARK_STOPS: tuple[Rgb, ...] = ((24, 44, 60), (18, 92, 108), (46, 158, 143), (205, 240, 150))

_FRAMES = (
    {
        "page": "#ffffff",
        "panel": "#eef1f4",
        "rule": "#d3d8de",
        "ink": "#1a1f26",
        "quiet": "#59616b",
        "accent": "#17667f",
    },
    {
        "page": "#12161c",
        "panel": "#1c222b",
        "rule": "#323a45",
        "ink": "#e6e9ee",
        "quiet": "#a3adb9",
        "accent": "#5cc2b4",
    },
)


def frame(dark: bool) -> dict[str, str]:
    """Colours of everything else, by name: page, panel and rule behind, ink, quiet and accent on them."""
    return dict(_FRAMES[dark])


def shades(dark: bool) -> list[tuple[str, str]]:
    """(background, text) of levels 0 … LEVELS."""
    # Text that no head kept stands on the page itself, dimmed.
    first = (_FRAMES[dark]["page"], "#8d97a3" if dark else "#686f78")
    stops = _DARK_STOPS if dark else _LIGHT_STOPS
    return [first, *(_shade(stops, i / (LEVELS - 1)) for i in range(LEVELS))]


def _shade(stops: tuple[Rgb, ...], at: float) -> tuple[str, str]:
    legs = list(pairwise(stops))
    leg = min(int(at * len(legs)), len(legs) - 1)
    share = at * len(legs) - leg
    mixed = "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*legs[leg], strict=True))
    return mixed, max(("#000000", "#ffffff"), key=lambda text: contrast(mixed, text))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours "#rrggbb", 1 … 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
