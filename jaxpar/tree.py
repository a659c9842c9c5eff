"""Names of the arrays in a pytree: "params/blocks/mlp/up", "opt_state/0/mu/blocks/mlp/up".

A name depends on attributes, dict keys and positions only, never on Python classes, so that renaming a class,
moving a module or swapping a dict for a NamedTuple changes no name on disk. Two rules make names natural:

- the box of an NNX variable is transparent: `model.blocks.up` is "blocks/up", not "blocks/up/value";
- entries of a sequence are counted among those that hold arrays, so that an empty optimizer state (clipping,
  weight decay) can join or leave a chain without renaming its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEPARATOR = "/"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of `tree` by name, in the order of `jax.tree.leaves`."""
    import jax

    paths_and_leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = _names([path for path, _ in paths_and_leaves])
    return dict(zip(names, (leaf for _, leaf in paths_and_leaves)))


def from_named(template: Any, named: Mapping[str, Any]) -> Any:
    """A tree shaped like `template` whose leaves are looked up by name; KeyError when one is missing."""
    import jax

    structure = jax.tree.structure(template)
    return jax.tree.unflatten(structure, [named[name] for name in named_leaves(template)])


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}."""
    root: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split(SEPARATOR)
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def _names(paths: list[tuple[Any, ...]]) -> list[str]:
    import jax

    positions: dict[tuple[Any, ...], list[int]] = {}  # indices that hold arrays, by the path of their sequence
    for path in paths:
        for depth, key in enumerate(path):
            if isinstance(key, jax.tree_util.SequenceKey):
                seen = positions.setdefault(path[:depth], [])
                if key.idx not in seen:
                    seen.append(key.idx)
    names = [_name(path, positions) for path in paths]
    if len(set(names)) != len(names):
        doubled = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two arrays of one tree have the same name: {', '.join(doubled)}")
    return names


def _name(path: tuple[Any, ...], positions: dict[tuple[Any, ...], list[int]]) -> str:
    import jax

    if len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    words = []
    for depth, key in enumerate(path):
        match key:
            case jax.tree_util.GetAttrKey(name=word):
                words.append(str(word))
            case jax.tree_util.SequenceKey(idx=index):
                words.append(str(positions[path[:depth]].index(index)))
            case jax.tree_util.DictKey(key=word) | jax.tree_util.FlattenedIndexKey(key=word):
                words.append(str(word))
            case _:
                words.append(str(key))
    if bad := [word for word in words if SEPARATOR in word or not word]:
        raise ValueError(f"a key of the tree cannot be part of a name: {bad[0]!r} in {path}")
    return SEPARATOR.join(words)
