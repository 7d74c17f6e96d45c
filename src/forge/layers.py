"""Layers of a configuration before it is typed: a file, one that extends it, each word of a command line."""

from collections.abc import Mapping
from typing import Any

from forge.errors import ConfigError
from forge.schema import Tree, default_at, hint_at, is_named


def merge(hint: Any, old: Any, new: Any, default: Any = None) -> Any:
    """Mappings merge key by key, and anything else is replaced.

    What is named keeps its arguments under the same name, and none under another. default: its name where
    `old` has none.
    """
    if is_named(hint) and isinstance(new, str | dict):
        old, given = _arguments(old), _arguments(new)
        name = old.get("name", default)
        if given.get("name", name) != name or not old:
            return new
        new = given
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    merged = {
        name: merge(hint_at(hint, str(name)), old.get(name), value, default_at(hint, str(name)))
        for name, value in new.items()
    }
    return {**old, **merged}


def renamed(schema: type[Any], layer: Tree, aliases: Mapping[str, str], where: str) -> Tree:
    """The layer with the key that is meant in the place of every alias ("in run.yaml": where it stands).

    Raises ConfigError for a layer that has both.
    """
    for alias, key in aliases.items():
        rest, value = _taken_out(layer, alias.split("."))
        if rest is None:
            continue
        if _taken_out(layer, key.split("."))[0] is not None:
            raise ConfigError(f"{alias} and {key} {where} are two names of one key: keep one of them")
        layer = merge(schema, rest, nested(key, value))
    return layer


def nested(key: str, value: Any) -> Tree:
    """("a.b", v) -> {"a": {"b": v}}."""
    *sections, last = key.split(".")
    tree = {last: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def _arguments(named: Any) -> Tree:
    """`NAME` -> {name: NAME}; what is a mapping already stays one."""
    return named if isinstance(named, dict) else {} if named is None else {"name": named}


def _taken_out(tree: Any, parts: list[str]) -> tuple[Tree | None, Any]:
    """The tree without the key of these parts, and its value; None where there is no such key."""
    first, *others = parts
    if not isinstance(tree, dict) or first not in tree:
        return None, None
    if not others:
        return {name: value for name, value in tree.items() if name != first}, tree[first]
    rest, value = _taken_out(tree[first], others)
    return (None if rest is None else {**tree, first: rest}), value
