"""A check of compiled programs: no collective-permute where only some of the stages may run it.

Branches of a pipeline run on some stages and not on others. Collectives inside one stage are safe there, but XLA
rendezvous for a collective-permute over the whole mesh, so one in such a branch waits for ever.
"""

from __future__ import annotations

import re

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
_PERMUTE = re.compile(r" collective-permute(?:-start)?\(")
_SHOWN = 160  # characters of an offending line


def divergent_permutes(hlo_text: str) -> list[str]:
    """Lines of a compiled program (`compiled.as_text()`) that permute inside a conditional; empty when it is safe."""
    branches: set[str] = set()
    callers: dict[str, set[str]] = {}
    permutes: list[tuple[str, str]] = []
    computation = ""
    for line in hlo_text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header.group(1)
        inside = [name for group in _BRANCHES.findall(line) for name in re.findall(r"[\w.\-]+", group)]
        inside += _TRUE_FALSE.findall(line)
        branches.update(inside)
        for name in [*_CALLED.findall(line), *inside]:
            callers.setdefault(name, set()).add(computation)
        if _PERMUTE.search(line):
            permutes.append((computation, line.strip()[:_SHOWN]))
    return [line for computation, line in permutes if _is_inside(computation, branches, callers)]


def _is_inside(computation: str, branches: set[str], callers: dict[str, set[str]]) -> bool:
    """Whether a computation is a branch or is called, however indirectly, from one."""
    seen, todo = set(), [computation]
    while todo:
        name = todo.pop()
        if name in branches:
            return True
        if name not in seen:
            seen.add(name)
            todo.extend(callers.get(name, ()))
    return False
