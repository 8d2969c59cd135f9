"""How figures are written for people."""

from __future__ import annotations

import math


def figure(value: float) -> str:
    """Three significant digits, four from 1 on: 0.904, 0.900, 23.41, 3e-5, 12,345; NaN and infinities by name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) < 1e9 and (value == round(value) or abs(value) >= 1e4):
        return f"{value:,.0f}"
    if 0.1 <= abs(value) < 1:
        return f"{value:.3f}"
    mantissa, exponent, power = f"{value:.{3 if abs(value) < 1 else 4}g}".partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


def change(before: float, after: float) -> str:
    """The signed difference: +0.428."""
    difference = after - before
    return f"+{figure(difference)}" if difference > 0 else figure(difference)


def duration(seconds: float) -> str:
    """0:21, 12:05, 3:02:10."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
