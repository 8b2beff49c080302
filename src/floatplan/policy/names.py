"""Globs over qualified names, and what to say of one that matches nothing.

``*``, ``?`` and ``[abc]`` stand within one segment of a name and never cross a dot; ``**`` stands for any
number of segments, none included; "" is the model itself.
"""

from __future__ import annotations

import glob as python_glob
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from floatplan.errors import nearest


def segments(name: str) -> tuple[str, ...]:
    """What stands between the dots; nothing for ""."""
    return tuple(name.split(".")) if name else ()


def matches(glob: str, name: str) -> bool:
    """Whether ``glob`` matches the qualified name ``name``."""
    return _matches(segments(glob), segments(name))


def joined(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Globs that match ``names`` and no other of ``all_names``: one for all that differ in numbers only."""
    left, known = dict.fromkeys(names), list(all_names)
    wanted = set(left)
    globs: list[str] = []
    while left:
        name = next(iter(left))
        glob, found = python_glob.escape(name), {name}
        parts = [python_glob.escape(part) for part in segments(name)]
        for place, part in enumerate(parts):
            if part.isdecimal():
                wider = ".".join((*parts[:place], "*", *parts[place + 1 :]))
                matched = {other for other in known if matches(wider, other)}
                if len(matched) > len(found) and matched <= wanted:
                    glob, found = wider, matched
        globs.append(glob)
        for one in found:
            left.pop(one, None)
    return globs


def nearest_names(glob: str, names: list[str], kind: str) -> str:
    """A hint for a glob that matches nothing: the same at any depth, itself put right, or some names.

    Args:
        glob: what matches none of ``names``.
        names: the qualified names that there are.
        kind: what they name, in the plural, such as "modules".
    """
    wanted = segments(glob)
    deeper = ("**", *wanted)
    if any(_matches(deeper, segments(name)) for name in names):
        return f"; did you mean {'.'.join(deeper)!r}?"
    put_right = {_put_right(wanted, segments(name)): None for name in names}
    known = [name for name in names if name]
    some = ", ".join(map(repr, known[:5])) or "none"
    return (
        nearest(glob, filter(None, put_right))
        or nearest(glob, known)
        or f"; its {kind}: {some}{', ...' if len(known) > 5 else ''}"
    )


def _matches(glob: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not glob:
        return not name
    first, rest = glob[0], glob[1:]
    if first == "**":
        return any(_matches(rest, name[start:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], first) and _matches(rest, name[1:])


def _put_right(glob: tuple[str, ...], name: tuple[str, ...]) -> str:
    """``glob`` with the segments that do not match replaced by those of ``name``, if all of them are near."""
    if len(glob) != len(name):
        return ""
    pairs = [(want, have, fnmatchcase(have, want)) for want, have in zip(glob, name, strict=True)]
    if not all(fits or get_close_matches(want, [have]) for want, have, fits in pairs):
        return ""
    return ".".join(want if fits else have for want, have, fits in pairs)
