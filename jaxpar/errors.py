"""The one exception that users cause and can mend.

Scripts turn a `UserError` into its message on stderr and exit code 2; every other exception is a bug
of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a config, a file or a command line: what, got, wanted, and what would work."""


def raise_together(problems: Iterable[str]) -> None:
    """Raise one `UserError` that lists every problem; do nothing when there is none."""
    problems = list(problems)
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
        raise UserError(f"{len(problems)} problems:\n{listed}")
