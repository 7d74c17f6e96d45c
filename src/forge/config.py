"""Configuration: YAML files and command-line overrides become a typed, validated tree of dataclasses."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.errors import ConfigError
from forge.layers import merge, nested, renamed
from forge.schema import Tree, build, check_keys, hint_at, is_named, options_of, unknown_key

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What the command line asked for."""

    config: T
    source: Path  # the YAML file
    dry_run: bool  # --dry-run: show the configuration and stop


def load(
    schema: type[T],
    argv: Sequence[str],
    *,
    default_config: Path,
    shorthands: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    alone: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """Reads `--config FILE` (else `default_config`), then the overrides `--a.b v`, `--a.b=v` and `a.b=v`.
    `--a` without a value is `--a true` where a is true or false; `alone` gives the values of other such keys.

    `schema` is described in forge.schema. A file may hold `extends: other.yaml`, relative to itself; its own
    keys win. Overrides win over files; of two overrides the one whose key is longer, then the later one.

    `shorthands` maps the first part of a key on the command line to a longer one ("trainer" ->
    "services.trainer"), tried where the schema has no such key. `aliases` maps whole keys that the schema
    does not have to those that they stand for, in files too. Every mistake is a ConfigError of one line.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        exit_on_error=False,
        usage="%(prog)s [--config FILE] [--dry-run] [--KEY VALUE | KEY=VALUE] ...",
        epilog="A KEY is written with dots, as in training.seq_len; --dry-run shows all of them.",
    )
    parser.add_argument(
        "--config", type=Path, default=default_config, metavar="FILE", help="YAML file to read"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the resolved configuration and stop")
    try:
        known, words = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"command line: {error}") from error
    aliases = aliases or {}
    tree = read_yaml(schema, known.config, aliases)

    def resolve(name: str) -> str:
        return _resolve_key(schema, name, shorthands or {}, aliases)

    def flag(key: str) -> str | None:
        is_switch = bool in options_of(hint_at(schema, key))
        return (alone or {}).get(key, "true" if is_switch else None)

    for key, text in sorted(_overrides(words, resolve, flag), key=lambda override: override[0].count(".")):
        value = _parse_value(hint_at(schema, key), text, key)
        layer = renamed(schema, nested(key, value), aliases, "on the command line")
        tree = merge(schema, tree, layer)
    return Loaded(build(schema, tree), known.config, known.dry_run)


def read_yaml(schema: type[Any], path: Path, aliases: Mapping[str, str] | None = None) -> Tree:
    """The keys of a file and of those it extends, merged and interpolated, not yet typed."""
    try:
        merged = OmegaConf.create(_read(schema, path, aliases or {}, ()))
        return OmegaConf.to_container(merged, resolve=True)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error


def describe(config: Any) -> str:
    """A configuration as YAML; `load` reads it back to the same."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _read(schema: type[Any], path: Path, aliases: Mapping[str, str], extending: tuple[Path, ...]) -> Tree:
    path = path.resolve()
    if path in extending:
        circle = " -> ".join(p.name for p in (*extending, path))
        raise ConfigError(f"extends goes in a circle: {circle}")
    if not path.is_file():
        wanted_by = f", which {extending[-1]} extends" if extending else ""
        raise ConfigError(f"there is no config file {path}{wanted_by}")
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys with values, got a {type(tree).__name__}")
    base = tree.pop("extends", None)
    tree = renamed(schema, tree, aliases, f"in {path.name}")
    check_keys(schema, tree, source=path.name, aliases=aliases)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"extends in {path} must be the name of a YAML file, got {base!r}")
    return merge(schema, _read(schema, path.parent / base, aliases, (*extending, path)), tree)


def _overrides(
    arguments: list[str], resolve: Callable[[str], str], flag: Callable[[str], str | None]
) -> Iterator[tuple[str, str]]:
    """`--a.b v`, `--a.b=v`, `a.b=v` -> ("a.b", "v"). flag: a key's value where it stands alone, if it may."""
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals and not argument.startswith("--"):
            raise ConfigError(f"can't read {argument!r} on the command line: write --KEY VALUE or KEY=VALUE")
        key = resolve(name)
        if not equals:
            standalone = flag(key)
            if queue and not queue[0].startswith("--") and (standalone is None or "=" not in queue[0]):
                text = queue.pop(0)
            elif standalone is None:
                raise ConfigError(f"--{name} needs a value: write --{name} VALUE")
            else:
                text = standalone
        yield key, text


def _resolve_key(
    schema: type[Any], name: str, shorthands: Mapping[str, str], aliases: Mapping[str, str]
) -> str:
    if name in aliases:
        return aliases[name]
    first, dot, rest = name.partition(".")
    candidates = [name, f"{shorthands[first]}{dot}{rest}"] if first in shorthands else [name]
    candidates.append(name.replace("-", "_"))
    for key in candidates:
        if hint_at(schema, key) is not None:
            parent, _, last = key.rpartition(".")  # the name of what is named goes before its arguments
            return parent if last == "name" and is_named(hint_at(schema, parent)) else key
    raise unknown_key(schema, name, shorthands=shorthands, aliases=aliases)


def _parse_value(hint: Any, text: str, key: str) -> Any:
    """The value as YAML, where text is wanted as it stands."""
    if str in options_of(hint) and text != "null" and not (is_named(hint) and text.startswith("{")):
        return text
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)["value"]  # pyright: ignore
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}: can't read the value {text!r}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
