"""The import direction of the layers, and one door to each vendor, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/forge").rglob("*.py"))

# The first prefix that fits decides. A layer may import its own and lower ones; see the tests for exceptions.
LAYERS = [
    ("forge.errors", 0),
    ("forge.data_models", 0),
    ("forge.rl.grading", 3),
    ("forge.rl.checks", 3),
    ("forge.rl.evaluation", 3),
    ("forge.rl.best", 3),
    ("forge.rl.colocation", 3),
    ("forge.rl.loops", 3),
    ("forge.rl.minibatches", 3),
    ("forge.rl.weight_sync", 3),
    ("forge.rl", 1),
    ("forge.data.dataset", 3),
    ("forge.data.chat_dataset", 3),
    ("forge.data", 1),
    ("forge.config", 1),
    ("forge.observability", 1),
    ("forge.weights", 1),
    ("forge.controller", 2),
    ("forge.actors", 3),
    ("forge.envs", 3),
    ("forge.app", 3),
    ("forge.cli", 3),
    ("forge.doctor", 3),
    ("forge", 0),
]
DOORS = {
    "torchstore": ["forge.weights"],
    "vllm": ["forge.actors._vllm"],
    "torchtitan": ["forge.actors._titan", "forge.actors.trainer"],
    "omegaconf": ["forge.config"],
    "wandb": ["forge.observability"],
    "monarch": ["forge.controller", "forge.weights"],
}


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    return name.removesuffix(".__init__")


def layer_of(module: str) -> int:
    return next(layer for prefix, layer in LAYERS if module == prefix or module.startswith(f"{prefix}."))


def imports_of(path: Path, *, whole_file: bool = True) -> set[str]:
    """Modules that a file imports; only those at its top level when not whole_file."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if whole_file else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_module_imports_only_its_own_layer_and_lower_ones(path: Path) -> None:
    module = module_of(path)
    if module == "forge.doctor":  # looks at everything, by design
        return
    for imported in imports_of(path):
        if imported.split(".")[0] == "forge" and imported != "forge":
            assert layer_of(imported) <= layer_of(module), f"{module} imports {imported} from a higher layer"
        if (
            module.startswith("forge.controller")
            and imported.startswith("forge.")
            and layer_of(imported) == 1
        ):
            assert imported.startswith("forge.observability"), f"{module} may not know {imported}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_each_vendor_has_one_door(path: Path) -> None:
    module = module_of(path)
    if module == "forge.doctor":
        return
    for imported in imports_of(path):
        doors = DOORS.get(imported.split(".")[0])
        if doors is not None:
            assert any(module == d or module.startswith(d) for d in doors), (
                f"{module} imports {imported}; only {doors} may"
            )


def test_losses_and_rewards_load_without_the_heavy_packages() -> None:
    """Follows the imports that run when a module is loaded."""
    sources = {module_of(path): path for path in SOURCES}
    heavy = {"vllm", "torchtitan", "monarch", "torchstore", "wandb"}
    for start in ("forge.rl.loss", "forge.data.rewards", "forge.rl.advantage", "forge.rl.collate"):
        seen, todo = set(), [start]
        while todo:
            module = todo.pop()
            parents = {".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 2)}
            for name in parents - seen:
                seen.add(name)
                if name in sources:
                    todo += list(imports_of(sources[name], whole_file=False))
        assert not {name.split(".")[0] for name in seen} & heavy, f"{start} loads {sorted(seen)}"


def test_every_package_says_its_stage_in_its_first_line() -> None:
    for path in SOURCES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
