"""The configuration: files, command line, types, and what every kind of mistake is answered with."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from forge.config import Loaded, describe, load
from forge.errors import AssetError, ConfigError


@dataclass(frozen=True, slots=True)
class Machine:
    procs: int = 1
    label: str | None = None

    def __post_init__(self) -> None:
        if self.procs < 1:
            raise ConfigError(f"procs must be at least 1, got {self.procs}")


@dataclass(frozen=True, slots=True)
class Machines:
    left: Machine = field(default_factory=Machine)
    right: Machine | None = None


@dataclass(frozen=True, slots=True)
class Training:
    learning_rate: float = 0.1
    batch_size: int = 4
    shuffle: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    model: str
    training: Training = field(default_factory=Training)
    machines: Machines = field(default_factory=Machines)
    left: dict[str, Any] = field(default_factory=dict)
    rule: str | dict[str, Any] = "mean"


def load_run(folder: Path, text: str, *argv: str) -> Loaded[Run]:
    path = folder / "run.yaml"
    path.write_text(text)
    shorthands = {"left": "machines.left", "right": "machines.right"}
    aliases = {"training.cap": "rule.cap", "machines.left.low": "rule.low"}
    return load(Run, argv, default_config=path, shorthands=shorthands, aliases=aliases)


def error_of(folder: Path, text: str, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(folder, text, *argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_alone_gives_typed_values_and_defaults(tmp_path: Path) -> None:
    text = "model: tiny\ntraining: {learning_rate: 1e-6, betas: [0, 1], limit: null}\nmachines: {right: {}}\n"
    loaded = load_run(tmp_path, text)
    assert loaded.config == Run(
        model="tiny",
        training=Training(learning_rate=0.000001, betas=[0.0, 1.0]),
        machines=Machines(right=Machine()),
    )
    assert isinstance(loaded.config.training.betas[0], float)
    assert not loaded.dry_run


@pytest.mark.parametrize(
    "argv",
    [["--training.batch_size", "8"], ["training.batch_size=8"], ["--training.batch_size=8"]],
    ids=["two words", "bare", "with equals sign"],
)
def test_the_three_forms_of_an_override_mean_the_same(tmp_path: Path, argv: list[str]) -> None:
    assert load_run(tmp_path, "model: tiny\n", *argv).config.training.batch_size == 8


def test_a_switch_may_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntraining: {shuffle: false}")
    words = ["--machines.left.label", "--training.shuffle", "training.batch_size=2", "--model", "a=b"]
    config = load(Run, words, default_config=path, alone={"machines.left.label": "last"}).config
    assert config.machines.left.label == "last" and config.training.shuffle
    assert config.training.batch_size == 2 and config.model == "a=b"
    config = load(Run, ["--training.learning-rate", "2"], default_config=path).config
    assert config.training.learning_rate == 2.0


def test_overrides_reach_every_type(tmp_path: Path) -> None:
    config = load_run(
        tmp_path,
        "model: tiny\nmachines: {right: {procs: 2}}\n",
        "--model=hf://Org/Name: 7",
        "--training.learning_rate",
        "1e-6",
        "training.shuffle=false",
        "training.betas=[0.5, 0.6]",
        "training.limit=-1",
        "machines.right=null",
        "--left.depth.x=3",
        "--left.label",
        "7",
    ).config
    assert config.model == "hf://Org/Name: 7"
    assert config.training == Training(1e-6, shuffle=False, betas=[0.5, 0.6], limit=-1)
    assert config.machines.right is None
    assert config.left == {"depth": {"x": 3}, "label": 7}


def test_the_last_override_wins_and_all_win_over_the_file(tmp_path: Path) -> None:
    text = "model: tiny\ntraining: {batch_size: 2}\n"
    loaded = load_run(tmp_path, text, "training.batch_size=8", "--training.batch_size", "16", "--dry-run")
    assert loaded.config.training.batch_size == 16
    assert loaded.dry_run


def test_a_shorthand_stands_for_the_longer_key(tmp_path: Path) -> None:
    assert load_run(tmp_path, "model: tiny\n", "--right.procs", "3").config.machines.right == Machine(3)


def test_a_section_that_has_the_key_itself_is_not_a_shorthand(tmp_path: Path) -> None:
    config = load_run(tmp_path, "model: tiny\n", "--left.procs", "3").config
    assert config.left == {"procs": 3}  # a mapping takes any key
    assert config.machines.left.procs == 1


def test_extends_merges_key_by_key_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text("model: base\ntraining: {batch_size: 2, betas: [0.1, 0.2]}\n")
    (tmp_path / "deep" / "middle.yaml").write_text("extends: ../base.yaml\ntraining: {shuffle: false}\n")
    (tmp_path / "deep" / "leaf.yaml").write_text("extends: middle.yaml\ntraining: {betas: [1.0]}\n")
    config = load(
        Run, ["--config", str(tmp_path / "deep" / "leaf.yaml")], default_config=tmp_path / "x"
    ).config
    assert config == Run("base", Training(batch_size=2, shuffle=False, betas=[1.0]))


@pytest.mark.parametrize(
    ("base", "leaf", "argv", "expected"),
    [
        ("", "", [], "mean"),
        ("rule: sum", "", [], "sum"),
        ("rule: {name: sum, cap: 1}", "", ["--rule", "mean"], "mean"),
        ("rule: {name: sum, cap: 1}", "", ["--rule.cap", "2e-1"], {"name": "sum", "cap": 0.2}),
        ("rule: {name: sum, cap: 1}", "rule: {low: 0}", [], {"name": "sum", "cap": 1, "low": 0}),
        ("rule: {name: sum, cap: 1}", "rule: {name: max, low: 0}", [], {"name": "max", "low": 0}),
        ("rule: sum", "", ["--rule.cap", "2", "--rule.low=0"], {"name": "sum", "cap": 2, "low": 0}),
        ("rule: sum", "", ["--rule", "max", "--rule.cap", "2"], {"name": "max", "cap": 2}),
        ("", "", ["--rule.cap", "2"], {"name": "mean", "cap": 2}),
        ("", "rule: {cap: 2}", [], {"name": "mean", "cap": 2}),
        ("rule: {name: sum, cap: 1}", "", ["--rule={name: max, low: 0}"], {"name": "max", "low": 0}),
        ("rule: {name: sum, cap: 1}", "", ["--rule", "sum"], {"name": "sum", "cap": 1}),
        ("rule: {name: sum, cap: 1}", "rule: sum", ["--rule.name=sum"], {"name": "sum", "cap": 1}),
        ("rule: {cap: 1}", "", ["--rule", "mean"], {"name": "mean", "cap": 1}),  # which is the default
        ("rule: {cap: 1}", "", ["--rule", "sum"], "sum"),
        ("rule: sum", "", ["--rule.cap", "2", "--rule", "max"], {"name": "max", "cap": 2}),
        ("rule: sum", "", ["--rule.cap", "2", "--rule.name", "max"], {"name": "max", "cap": 2}),
    ],
)
def test_a_name_may_have_arguments_which_another_name_does_not_keep(
    tmp_path: Path, base: str, leaf: str, argv: list[str], expected: object
) -> None:
    (tmp_path / "base.yaml").write_text(f"model: tiny\n{base}\n")
    assert load_run(tmp_path, f"extends: base.yaml\n{leaf}\n", *argv).config.rule == expected


@pytest.mark.parametrize(
    ("base", "leaf", "argv", "expected"),
    [
        ("training: {cap: 1}", "", [], {"name": "mean", "cap": 1}),
        ("rule: sum\ntraining: {cap: 1}", "", [], {"name": "sum", "cap": 1}),
        ("training: {cap: 1}", "rule: {cap: 2}", [], {"name": "mean", "cap": 2}),  # the later layer wins
        ("rule: {cap: 2}", "training: {cap: 1}", [], {"name": "mean", "cap": 1}),
        ("training: {cap: 1}", "", ["--rule.cap", "3"], {"name": "mean", "cap": 3}),
        ("rule: {cap: 1}", "", ["--training.cap", "3"], {"name": "mean", "cap": 3}),
        ("rule: {cap: 1}", "", ["--training={cap: 3}"], {"name": "mean", "cap": 3}),
        ("rule: {cap: 1}", "", ["--rule.cap=2", "--training.cap=3"], {"name": "mean", "cap": 3}),
        ("training: {cap: 1}", "rule: max", [], "max"),  # other names do not keep it
        ("training: {cap: 1}", "", ["--rule", "max", "--training.cap", "3"], {"name": "max", "cap": 3}),
        (
            "training: {cap: 1}\nmachines: {left: {low: 0, procs: 2}}",
            "",
            [],
            {"name": "mean", "cap": 1, "low": 0},
        ),
    ],
)
def test_an_alias_is_another_spelling_in_its_layer(
    tmp_path: Path, base: str, leaf: str, argv: list[str], expected: object
) -> None:
    (tmp_path / "base.yaml").write_text(f"model: tiny\n{base}\n")
    assert load_run(tmp_path, f"extends: base.yaml\n{leaf}\n", *argv).config.rule == expected


def test_interpolation_sees_the_merged_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: base\ntraining: {limit: '${training.batch_size}'}\n")
    assert load_run(tmp_path, "extends: base.yaml\ntraining: {batch_size: 32}\n").config.training.limit == 32


def test_a_described_configuration_loads_to_itself(tmp_path: Path) -> None:
    config = load_run(tmp_path, "model: 'null'\ntraining: {learning_rate: 1e-6}\nleft: {a: [1, x]}\n").config
    assert load_run(tmp_path, describe(config)).config == config


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--training.batch_siz", "8"], "unknown key training.batch_siz: did you mean training.batch_size?"),
        (["--batch_size", "8"], "unknown key batch_size: did you mean training.batch_size?"),
        (["--machines.left.batch_size=8"], "did you mean training.batch_size?"),
        (["--right.proc", "8"], "unknown key right.proc: did you mean right.procs?"),
        (["--trainng.batch_siz", "8"], "did you mean training.batch_size?"),
        (["--training.zzz", "8"], "training has learning_rate, batch_size, shuffle"),
        (["--zzz", "8"], "the top level has model, training, machines, left"),
        (["--training.batch_size.x", "8"], "unknown key training.batch_size.x"),
        (["--training.batch_size", "many"], "training.batch_size must be a whole number, got 'many'"),
        (["--training.batch_size", "2.5"], "training.batch_size must be a whole number, got 2.5"),
        (["--training.batch_size", "true"], "training.batch_size must be a whole number, got True"),
        (["--training.shuffle", "1"], "training.shuffle must be true or false, got 1"),
        (["--training.learning_rate", ".nan"], "training.learning_rate must be a number, got nan"),
        (["--training.limit", "x"], "training.limit must be a whole number or null, got 'x'"),
        (["--training.dtype", "int8"], "training.dtype must be one of bfloat16, float32, got 'int8'"),
        (["--training.betas", "0.9"], "training.betas must be a list, got 0.9"),
        (["--training.betas=[0.9, x]"], "training.betas[1] must be a number, got 'x'"),
        (["--training", "3"], "training must be a section of keys, got 3"),
        (["--model", "null"], "model must be text, got None"),
        (["--machines.right.procs", "0"], "machines.right.procs must be at least 1, got 0"),
        (["--right.procs", "0"], "machines.right.procs must be at least 1, got 0"),
        (["--training.betas=[0.9"], "training.betas: can't read the value '[0.9'"),
        (["--training.batch_size"], "--training.batch_size needs a value"),
        (["--training.batch_size", "--dry"], "--training.batch_size needs a value"),
        (["training.batch_size"], "can't read 'training.batch_size' on the command line"),
        (["--config"], "command line: argument --config: expected one argument"),
        (["--config", "/nowhere/x.yaml"], "there is no config file /nowhere/x.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(
    tmp_path: Path, argv: list[str], expected: str
) -> None:
    assert expected in error_of(tmp_path, "model: tiny\n", *argv)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training: {}\n", "model is required: set it in the YAML file or with --model VALUE"),
        ("model: x\ntrainin: {}\n", "unknown key trainin in run.yaml: did you mean training?"),
        (
            "model: x\nmachines: {left: {proc: 1}}\n",
            "unknown key machines.left.proc in run.yaml: did you mean",
        ),
        (
            "model: x\nmachines: {left: {procs: two}}\n",
            "machines.left.procs must be a whole number, got 'two'",
        ),
        (
            "model: x\ntraining: {cap: 1}\nrule: {cap: 1}\n",
            "training.cap and rule.cap in run.yaml are two names of one key: keep one of them",
        ),
        ("model: x\ntraining: {caps: 1}\n", "in run.yaml: did you mean training.cap?"),
        ("model: x\ntraining:\n", "training must be a section of keys, got None"),
        ("model: 7\n", "model must be text, got 7"),
        ("model: [x\n", "run.yaml is not valid YAML"),
        ("model: x\nmodel: y\n", "run.yaml is not valid YAML"),
        ("- model\n", "run.yaml must hold keys with values, got a list"),
        ("extends: no.yaml\nmodel: x\n", "there is no config file"),
        ("extends: run.yaml\nmodel: x\n", "extends goes in a circle: run.yaml -> run.yaml"),
        ("extends: 3\nmodel: x\n", "must be the name of a YAML file, got 3"),
        ("model: ${nothing}\n", "nothing"),
    ],
)
def test_a_mistake_in_the_file_is_one_clear_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(tmp_path, text)


def test_the_kind_of_a_sections_error_is_kept(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Assets:
        model: str

        def __post_init__(self) -> None:
            raise AssetError(f"model {self.model} is not there")

    (tmp_path / "run.yaml").write_text("model: x\n")
    with pytest.raises(AssetError, match="model x is not there"):
        load(Assets, [], default_config=tmp_path / "run.yaml")


def test_reading_a_configuration_imports_nothing_heavy() -> None:
    heavy = "torch vllm torchtitan torchstore monarch transformers datasets wandb matplotlib"
    loaded = f"[m for m in '{heavy}'.split() if m in sys.modules]"
    code = f"import sys, forge.config, apps.grpo.config; print({loaded})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
