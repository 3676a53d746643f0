"""Parse and print quantities with units: the only place where "900 GB/s" becomes 9e11 and back."""

import re
from collections.abc import Sequence

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = re.compile(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*(.*?)\s*")

GIB = 2**30

ALIKE = 0.0005
"""Shares by which two numbers differ below this one are printed as 0.0%."""


def parse_bytes(text: str | int | float) -> float:
    """Bytes in `text`: "80 GiB", "1.5 MB", or a plain number of bytes."""
    return _parse(text, lambda unit: _prefixed(unit, "B"), 'a size such as "80 GiB" or "512 MB"')


def parse_bytes_per_s(text: str | int | float) -> float:
    """Bytes per second in `text`: "900 GB/s", "200 Gbit/s", or a plain number of bytes per second."""

    def scale(unit: str) -> float | None:
        if not unit.endswith("/s"):
            return None
        amount = unit[:-2]
        if amount.endswith("bit"):
            prefix = _PREFIX.get(amount[:-3])
            return None if prefix is None else prefix / 8
        return _prefixed(amount, "B")

    return _parse(text, scale, 'a rate such as "900 GB/s" or "200 Gbit/s"')


def parse_flops_per_s(text: str | int | float) -> float:
    """FLOPs per second in `text`: "312 TFLOP/s", or a plain number."""
    return _parse(text, lambda unit: _prefixed(unit, "FLOP/s"), 'a rate such as "312 TFLOP/s"')


def parse_seconds(text: str | int | float) -> float:
    """Seconds in `text`: "5 us", "1.2 ms", or a plain number of seconds."""
    return _parse(text, _SECONDS.get, 'a time such as "5 us" or "1.2 ms"')


def format_bytes(num_bytes: float) -> str:
    """Binary size for people: 80 GiB, 1.50 GiB, 512 MiB."""
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    for unit, scale in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if _rounds_up_to(size, scale, 1024):
            return f"{sign}{_three_digits(size / scale)} {unit}"
    return f"{sign}{size:.0f} B"


def format_flops_per_s(rate: float) -> str:
    """Decimal rate for people: 312 TFLOP/s."""
    return f"{_decimal(rate)}FLOP/s"


def format_count(count: float) -> str:
    """Count for people: 8.03 B, 124 M, 512."""
    for unit, scale in ((" T", 1e12), (" B", 1e9), (" M", 1e6), (" K", 1e3)):
        if _rounds_up_to(count, scale):
            return f"{_three_digits(count / scale)}{unit}"
    return f"{count:.0f}"


def counted(count: int, noun: str, nouns: str | None = None) -> str:
    """A number with its noun, for people: 1 layer, 1,024 layers. nouns: the plural, if it does not end in s."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def first_of(names: Sequence[str], noun: str = "") -> str:
    """The first name, and how many others there are, for people: a (and 2 more). noun: what the others are."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more{noun and f' {noun}'})"


def gpus_in_words(count: int) -> str:
    """So many GPUs for people: 1 GPU, 1,024 GPUs."""
    return counted(count, "GPU")


def format_dollars(amount: float) -> str:
    """Price for people: $3.83, $824, $1.25 M."""
    return f"${amount:.2f}" if amount < 100 else f"${format_count(amount)}"


def format_change(share: float) -> str:
    """A change in percent with its sign; 0% without a sign if it rounds to that."""
    return f"{share:+.1%}" if abs(share) >= ALIKE else "0%"


def format_seconds(seconds: float) -> str:
    """Time for people: 1.25 s, 820 ms, 12.0 us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if _rounds_up_to(seconds, scale):
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def _prefixed(unit: str, base: str) -> float | None:
    if not unit.endswith(base):
        return None
    prefix = unit[: len(unit) - len(base)]
    return _PREFIX.get(prefix) or (_BINARY.get(prefix) if base == "B" else None)


def _parse(text: str | int | float, scale_of, example: str) -> float:  # type: ignore[no-untyped-def]
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    match = _NUMBER.fullmatch(str(text))
    scale = (1.0 if not match.group(2) else scale_of(match.group(2))) if match else None
    if match is None or scale is None:
        raise ValueError(f"cannot read {text!r}: give {example}")
    return float(match.group(1).replace("_", "")) * scale


def _decimal(value: float) -> str:
    for prefix in ("P", "T", "G", "M", "K"):
        if _rounds_up_to(value, _PREFIX[prefix]):
            return f"{_three_digits(value / _PREFIX[prefix])} {prefix}"
    return f"{value:.0f} "


def _rounds_up_to(value: float, scale: float, step: float = 1000) -> bool:
    """Whether a value is printed as at least one of a unit: 999.6 us become 1.00 ms. scale: the unit. step: how many of
    the next smaller unit make one."""
    return value >= scale * (1 - 0.5 / step)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
