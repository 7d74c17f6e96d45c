"""A schema: a tree of frozen dataclasses that says which keys a configuration has and of what type.

A field is a section (another dataclass) or a leaf: bool, int, float, str, Literal, list[...] or
dict[str, ...], each also `| None`. A leaf of type `str | dict[str, Any]` is named: a name, or a mapping of
`name` (if left out, the default's) and arguments. Defaults stand in the schema; a value of ??? in a file
has to be replaced on the command line. A section validates itself in `__post_init__` by raising ConfigError
with a message that begins with the name of its field; `build` puts the section's path in front of it.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forge.errors import ConfigError

T = TypeVar("T")
Tree = dict[str, Any]
"""A configuration before it is typed: nested mappings, lists and scalars."""

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def build(schema: type[T], tree: Any) -> T:
    """Nested mappings -> an instance of `schema`, with every key known, typed and validated."""
    if not isinstance(tree, dict):
        raise ConfigError(f"the configuration must be a section of keys, got {tree!r}")
    check_keys(schema, tree)
    return _build_section(schema, tree, "")


def check_keys(schema: type[Any], tree: Tree, *, source: str = "", aliases: Iterable[str] = ()) -> None:
    """ConfigError for the first key that the schema does not have; `source` names the file it stands in."""
    for key in _unknown_keys(schema, tree, ""):
        raise unknown_key(schema, key, source=source, aliases=aliases)


def hint_at(schema: type[Any], key: str) -> Any:
    """The type of a dotted key; None where the schema has no such key, Any within a mapping."""
    hint: Any = schema
    for part in key.split("."):
        section = _section(hint)
        if section is None:
            return Any if any(get_origin(option) is dict for option in options_of(hint)) else None
        hint = _hints(section).get(part)
        if hint is None:
            return None
    return hint


def default_at(hint: Any, name: str) -> Any:
    """The default of a field of a section; None where there is no such field, or none that is one value."""
    section = _section(hint)
    found = [field.default for field in dataclasses.fields(section) if field.name == name] if section else []
    return found[0] if found and found[0] is not dataclasses.MISSING else None


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a plain type is a union of one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_named(hint: Any) -> bool:
    """Whether it is a name, or a mapping with a name and its arguments."""
    options = options_of(hint)
    return str in options and any(get_origin(option) is dict for option in options)


def unknown_key(
    schema: type[Any],
    key: str,
    *,
    shorthands: Mapping[str, str] | None = None,
    source: str = "",
    aliases: Iterable[str] = (),
) -> ConfigError:
    """The error for a key that does not exist, with the one that was probably meant, or what there is.

    aliases: further keys that may have been meant.
    """
    keys = [*_leaves(schema), *_names(schema), *aliases]
    for short, long in (shorthands or {}).items():
        keys += [short + known.removeprefix(long) for known in keys if known.startswith(f"{long}.")]
    parent, _, last = key.rpartition(".")
    namesakes = [known for known in keys if known.rpartition(".")[2] == last]
    siblings = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == parent}
    guesses = difflib.get_close_matches(key, namesakes, 1, 0.0)
    guesses = guesses or [siblings[name] for name in difflib.get_close_matches(last, siblings, 1)]
    as_deep = [known for known in keys if known.count(".") == key.count(".")]
    guesses = guesses or difflib.get_close_matches(key, as_deep, 1, 0.8)
    if guesses:
        hint = f"did you mean {guesses[0]}?"
    else:
        while parent and _section(hint_at(schema, parent)) is None:
            parent = parent.rpartition(".")[0]
        section = _section(hint_at(schema, parent)) if parent else schema
        hint = f"{parent or 'the top level'} has {', '.join(_names(section or schema))}"
    return ConfigError(f"unknown key {key}{f' in {source}' if source else ''}: {hint}")


def _unknown_keys(schema: type[Any], tree: Tree, path: str) -> Iterator[str]:
    hints = _hints(schema)
    for name, value in tree.items():
        key = _join(path, str(name))
        section = _section(hints.get(name))
        if name not in hints:
            yield key
        elif section is not None and isinstance(value, dict):
            yield from _unknown_keys(section, value, key)


def _build_section(schema: type[T], tree: Tree, path: str) -> T:
    hints = _hints(schema)
    values = {}
    for field in _fields(schema):
        key = _join(path, field.name)
        if tree.get(field.name) == "???":
            raise ConfigError(f"{key} is for you to say: set it with --{key} VALUE")
        if field.name in tree:
            values[field.name] = _convert(hints[field.name], tree[field.name], key)
            if is_named(hints[field.name]) and isinstance(values[field.name], dict):
                name = {"name": field.default} if isinstance(field.default, str) else {}
                values[field.name] = name | values[field.name]
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key} is required: set it in the YAML file or with --{key} VALUE")
    try:
        return schema(**values)
    except ConfigError as error:  # translated: the section does not know where it stands
        raise type(error)(_join(path, str(error))) from error


def _convert(hint: Any, value: Any, key: str) -> Any:
    """Checks a value against a type. Whole numbers pass as float; nothing else is converted, but for `off`,
    which YAML reads as false."""
    if value is False and any(get_origin(o) is Literal and "off" in get_args(o) for o in options_of(hint)):
        value = "off"
    for option in options_of(hint):
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _build_section(option, value, key)  # pyright: ignore[reportArgumentType]
        if _accepts(option, value):
            return _convert_items(option, value, key)
    for option in options_of(hint):
        if not _is_readable(option):
            raise ConfigError(
                f"{key} can't be set in a configuration: it is of type {_spelled(option)}, not one of bool, "
                "int, float, str, Literal, list[...] and dict[str, ...]"
            )
    expected = " or ".join(_type_name(option) for option in options_of(hint))
    raise ConfigError(f"{key} must be {expected}, got {value!r}")


def _accepts(option: Any, value: Any) -> bool:
    origin = get_origin(option)
    if option is Any:
        return True
    if origin is Literal:
        return value in get_args(option)
    if origin in (list, dict):
        return isinstance(value, origin)
    if isinstance(value, bool):  # which Python counts among the whole numbers
        return option is bool
    if option is float:
        return isinstance(value, int | float) and not math.isnan(value)
    return isinstance(option, type) and isinstance(value, option)


def _is_readable(option: Any) -> bool:
    """Whether a file may hold a value of this type."""
    plain = option in TYPE_NAMES or option in (Any, list, dict, type(None))
    return plain or get_origin(option) in (Literal, list, dict) or dataclasses.is_dataclass(option)


def _spelled(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _convert_items(option: Any, value: Any, key: str) -> Any:
    if get_origin(option) is list:
        [item] = get_args(option)
        return [_convert(item, element, f"{key}[{i}]") for i, element in enumerate(value)]
    if get_origin(option) is dict:
        _, item = get_args(option)
        return {str(name): _convert(item, element, _join(key, str(name))) for name, element in value.items()}
    return float(value) if option is float else value


def _section(hint: Any) -> type[Any] | None:
    """The dataclass among the options of a hint."""
    return next((option for option in options_of(hint) if dataclasses.is_dataclass(option)), None)  # pyright: ignore


def _fields(section: type[Any]) -> list[dataclasses.Field[Any]]:
    """Those that a section is made with."""
    return [field for field in dataclasses.fields(section) if field.init]


def _hints(section: type[Any]) -> dict[str, Any]:
    """The type of each of them."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in _fields(section)}


def _names(section: type[Any]) -> list[str]:
    return [field.name for field in _fields(section)]


def _leaves(schema: type[Any]) -> Iterator[str]:
    for name, hint in _hints(schema).items():
        section = _section(hint)
        if section is None:
            yield name
        else:
            yield from (f"{name}.{key}" for key in _leaves(section))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _type_name(option: Any) -> str:
    if option is type(None):
        return "null"
    if get_origin(option) is Literal:
        return "one of " + ", ".join(map(str, get_args(option)))
    if dataclasses.is_dataclass(option):
        return "a section of keys"
    return TYPE_NAMES.get(option) or (
        "a list" if get_origin(option) is list else "a mapping of keys to values"
    )
