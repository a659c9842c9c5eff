"""One value of a config: from command-line text or a Python object to the type its setting is annotated with.

Owns what is accepted as an int, a float, a bool, a tuple. Text means the same in a file and on the command line:
`"0.1"` for a float setting is 0.1 in both, and what one refuses the other refuses.
"""

from __future__ import annotations

import ast
import dataclasses
import decimal
import difflib
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxpar.errors import UserError

TRUE_WORDS = ("true", "1", "on", "yes")
FALSE_WORDS = ("false", "0", "off", "no")
NONE_WORDS = ("none", "null")
LARGEST_INT = 2**63 - 1
A_FLOAT = "a float (such as 0.1 or 1e-4)"


def convert(value: Any, annotation: Any) -> Any:
    """`value` as `annotation`; raises `UserError` saying what was got and what is wanted, without the key."""
    if isinstance(value, str) and annotation is not str:
        value = _unquoted(value)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _optional(value, annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return _choice(value, typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return _tuple(value, typing.get_args(annotation))
    if dataclasses.is_dataclass(annotation):
        return _record(value, annotation)
    plain = {bool: _bool, int: _int, float: _float, str: _str}
    return plain[annotation](value)


def describe(annotation: Any) -> str:
    """The type as users read it, such as `int or None` or `"ring" | "auto"`."""
    args = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return f"{describe(_without_none(annotation))} or None"
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in args)
    if origin is tuple:
        inner = [describe(arg) for arg in args if arg is not Ellipsis]
        return f"tuple of {inner[0]}" if Ellipsis in args else f"({', '.join(inner)})"
    if dataclasses.is_dataclass(annotation):
        return "{" + ", ".join(field.name for field in dataclasses.fields(annotation)) + "}"
    return {bool: "true | false", int: "int", float: "float", str: "text"}[annotation]


def plain(value: Any) -> Any:
    """A ConfigDict (anything with `items`), lists and tuples inside, as plain dicts, lists and tuples."""
    if isinstance(value, Mapping) or callable(getattr(value, "items", None)):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(inner) for inner in value)
    return value


def _wrong(value: Any, wanted: str) -> UserError:
    return UserError(f"got {value!r}, wanted {wanted}")


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]:
        return text[1:-1].strip()
    return text


def _without_none(annotation: Any) -> Any:
    (inner,) = (arg for arg in typing.get_args(annotation) if arg is not type(None))
    return inner


def _optional(value: Any, annotation: Any) -> Any:
    if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS):
        return None
    inner = _without_none(annotation)
    if typing.get_origin(inner) is typing.Literal:
        return _choice(value, typing.get_args(inner), " | None")
    try:
        return convert(value, inner)
    except UserError as error:
        raise UserError(f"{error} or None") from error


def _bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
        return value.lower() in TRUE_WORDS
    if isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    raise _wrong(value, "true or false (also 1/0, on/off, yes/no)")


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        raise _wrong(value, "an int")
    try:
        # Decimal, because 1e23 and 1_000 must be exact, and int("1e4") fails.
        number = decimal.Decimal(value if isinstance(value, str) else str(value))
    except decimal.InvalidOperation:
        raise _wrong(value, "an int") from None
    if not number.is_finite() or number.copy_abs() > LARGEST_INT or number != number.to_integral_value():
        raise _wrong(value, "an int")
    return int(number)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
        raise _wrong(value, A_FLOAT)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _wrong(value, A_FLOAT) from None
    if not math.isfinite(number):
        raise _wrong(value, "a finite float")
    return number


def _str(value: Any) -> str:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or value.strip().lower() in NONE_WORDS:
        raise _wrong(value, "text")
    return _unquoted(value)


def _choice(value: Any, choices: tuple[Any, ...], none: str = "") -> Any:
    listed = " | ".join(str(choice) for choice in choices) + none
    if all(isinstance(choice, int) for choice in choices):
        try:
            number = _int(value)
        except UserError:
            raise _wrong(value, f"one of {listed}") from None
        if number in choices:
            return number
        raise _wrong(value, f"one of {listed}")
    if isinstance(value, str) and value in choices:
        return value
    close = difflib.get_close_matches(str(value).lower(), choices, n=1)
    raise _wrong(value, f"one of {listed}" + (f"; did you mean {close[0]}?" if close else ""))


def _tuple(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = _items(value)
    if not isinstance(value, list | tuple):
        value = (value,)
    if Ellipsis in args:
        return tuple(convert(item, args[0]) for item in value)
    if len(value) != len(args):
        raise _wrong(value, f"{len(args)} items")
    return tuple(convert(item, arg) for item, arg in zip(value, args))


def _items(text: str) -> tuple[Any, ...]:
    """`(3,4)`, `3,4`, `a,b`, `("a", "b")`, `[1]`, `()`; nested tuples and dicts as Python writes them."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
            text = text[1:-1]
        return tuple(_unquoted(item) for item in text.split(",") if item.strip())
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,) if isinstance(value, dict) else (text.strip("()"),)


def _record(value: Any, annotation: Any) -> Any:
    value = plain(value)
    if not isinstance(value, dict):
        raise _wrong(value, f"a dict with {describe(annotation)}")
    hints = typing.get_type_hints(annotation)
    unknown = [key for key in value if key not in hints]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), hints, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(hints)}"
        raise UserError(f"unknown key {unknown[0]!r}; {hint}")
    required = [
        field.name
        for field in dataclasses.fields(annotation)
        if field.default is dataclasses.MISSING and field.name not in value
    ]
    if required:
        raise UserError(f"got {value!r}, which lacks {', '.join(required)}")
    converted = {}
    for key, inner in value.items():
        try:
            converted[key] = convert(inner, hints[key])
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
    return annotation(**converted)
