"""Configuration: YAML files and command-line overrides become a typed, validated tree of dataclasses."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge.errors import ConfigError
from forge.schema import Tree, build, check_keys, hint_at, options_of, unknown_key

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """What the command line asked for."""

    config: T
    source: Path  # the YAML file
    dry_run: bool  # --dry-run: show the configuration and stop


def load(
    schema: type[T], argv: Sequence[str], *, default_config: Path, shorthands: Mapping[str, str] | None = None
) -> Loaded[T]:
    """Reads `--config FILE` (else `default_config`), then the overrides `--a.b v`, `--a.b=v` and `a.b=v`.

    `schema` is described in forge.schema. A file may hold `extends: other.yaml`, relative to itself; its own
    keys win. `shorthands` maps the first part of a key on the command line to a longer one ("trainer" ->
    "services.trainer"), tried where the schema has no such key. Every mistake is a ConfigError of one line.
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
        known, overrides = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"command line: {error}") from error
    tree = read_yaml(schema, known.config)
    for name, text in _split_overrides(overrides):
        key = _resolve_key(schema, name, shorthands or {})
        _set(tree, key, _parse_value(hint_at(schema, key), text, key))
    return Loaded(build(schema, tree), known.config, known.dry_run)


def read_yaml(schema: type[Any], path: Path) -> Tree:
    """The keys of a file and of those it extends, merged and interpolated, not yet typed."""
    try:
        merged = OmegaConf.create(_read(schema, path, ()))
        return OmegaConf.to_container(merged, resolve=True)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error


def describe(config: Any) -> str:
    """A configuration as YAML; `load` reads it back to the same."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _read(schema: type[Any], path: Path, extending: tuple[Path, ...]) -> Tree:
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
    check_keys(schema, tree, path.name)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"extends in {path} must be the name of a YAML file, got {base!r}")
    return _merge(_read(schema, path.parent / base, (*extending, path)), tree)


def _merge(old: Any, new: Any) -> Any:
    """Mappings merge key by key; anything else is replaced."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{name: _merge(old.get(name), value) for name, value in new.items()}}


def _split_overrides(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """`--a.b v`, `--a.b=v`, `a.b=v` -> ("a.b", "v")."""
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not equals and not argument.startswith("--"):
            raise ConfigError(f"can't read {argument!r} on the command line: write --KEY VALUE or KEY=VALUE")
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value: write --{name} VALUE")
            text = queue.pop(0)
        yield name, text


def _resolve_key(schema: type[Any], name: str, shorthands: Mapping[str, str]) -> str:
    first, dot, rest = name.partition(".")
    candidates = [name, f"{shorthands[first]}{dot}{rest}"] if first in shorthands else [name]
    for key in candidates:
        if hint_at(schema, key) is not None:
            return key
    raise unknown_key(schema, name, shorthands=shorthands)


def _parse_value(hint: Any, text: str, key: str) -> Any:
    """The value as YAML, where text is wanted as it stands."""
    if str in options_of(hint) and text != "null":
        return text
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=True)["value"]  # pyright: ignore
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}: can't read the value {text!r}: {_one_line(error)}") from error


def _set(tree: Tree, key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[last] = _merge(tree.get(last), value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
