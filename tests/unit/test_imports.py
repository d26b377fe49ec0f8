"""No module of regrow imports itself by way of others, and what a function imports is loaded late for a reason."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PLATFORM = Path(__file__).parents[2] / "platform"

# {reason: {module: what its functions import}}; docs/decisions/0025 has the reasons at length
ALLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "jobs.submit renders, and settings are checked, without Arrow": {
        "regrow.data.preflight": (
            *("regrow.data.read.corpora", "regrow.data.prepare.files", "regrow.data.read.manifest"),
            *("regrow.data.prepare.prepare", "regrow.data.prepare.spool", "regrow.data.prepare.tokenizer"),
        ),
        "regrow.storage": ("fsspec", "pyarrow", "boto3", "botocore"),  # the last two for S3 alone
    },
    "PyYAML, which a machine that acceptance tries may lack": {
        "regrow.config.plain": ("regrow.config.conf_yaml",),
    },
    "slow to load, and needed where the hub is asked, or text is encoded": {
        "regrow.data.preflight": ("huggingface_hub",),
        "regrow.data.prepare.tokenizer": ("tokenizers",),
    },
    "Ray where the same module works without": {
        "regrow.data.prepare.distribute": ("ray",),
        "regrow.submit.job_status": ("ray.job_submission", "regrow.submit.ray_jobs"),
        "regrow.submit.submit": ("regrow.submit.ray_jobs",),
    },
    "parts of Ray that one process of many needs": {
        "regrow.data.stream.dataset": ("ray.data",),
        "regrow.drill.nodes": ("ray._private", "ray._raylet", "ray.cluster_utils", "ray.exceptions"),
        "regrow.drill.nodes_apart": ("ray._private.authentication", "ray._private.state", "ray._raylet"),
        "regrow.runtime.actor": ("ray.util.scheduling_strategies",),
        "regrow.runtime.cluster": ("ray._private", "ray.cluster_utils"),
        "regrow.runtime.head": (
            *("grpc", "ray._private.services", "ray._private.authentication", "ray._raylet", "ray.exceptions"),
        ),
        "regrow.runtime.worker": ("ray.train.torch",),
    },
    "a worker's imports, which the driver has no use for": {
        "regrow.runtime.entry": ("regrow.runtime.worker",),
    },
    "Ray's insides: a Ray that has other ones still trains, with restarts": {
        "regrow.runtime.driver": ("regrow.runtime.trainer",),
        "regrow.runtime.trainer": ("regrow.runtime.ray_train",),
    },
    "written against torch 2.13, in processes that may have an older one": {
        "regrow.accept.outlive": ("regrow.parallel.asynchronous",),
        "regrow.runtime.worker": ("regrow.parallel.asynchronous",),
    },
    "torchao, or torch's compiler, where a setting asks for them": {
        "regrow.parallel.compile": ("torch._dynamo.config", "torch._inductor.config"),
        "regrow.parallel.float8": ("regrow.parallel.float8_all_gather", "torchao.float8"),
    },
    "an optional package, or torch behind settings of the environment": {
        "regrow.evaluate.harness": ("lm_eval", "torch"),
        "regrow.evaluate.documents": ("datasets",),
    },
    "torch, which takes seconds, where a command reads tensors": {
        "regrow.state.commands": ("regrow.state.disk.tensors", "regrow.state.exchange.runs"),
    },
    "what draws, where something is drawn": {
        "regrow.drill.result": ("rich",),
        "regrow.show.console": ("rich",),
        "regrow.show.tensorboard": ("tensorboard",),
        "regrow.submit.waiting": ("rich",),
    },
    "keepers map slots without torch; a rank reads them as tensors": {
        "regrow.state.memory.arenas": ("torch",),
        "regrow.state.memory.slots": ("torch",),
    },
}


@cache
def modules() -> dict[str, set[tuple[str, bool]]]:
    """What each imports, and whether a function does it."""
    trees = {}
    for path in sorted((PLATFORM / "regrow").rglob("*.py")):
        name = ".".join(path.relative_to(PLATFORM).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text())
    return {name: set(imports(tree, set(trees))) for name, tree in trees.items()}


def imports(node: ast.AST, known: set[str], *, late: bool = False) -> Iterator[tuple[str, bool]]:
    """What is imported below a node, and whether a function does it; not what is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield (whole if whole in known else child.module), late
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(child, known, late=late or is_function)


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        reach[start], ahead = set(), [start]
        while ahead:
            new = edges[ahead.pop()] - reach[start]
            reach[start] |= new
            ahead += new
    found: list[set[str]] = []
    for name in edges:
        circle = {other for other in reach[name] if name in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = set(modules())
    edges = {name: {each for each, _ in found} & known - {name} for name, found in modules().items()}
    assert circles(edges) == []


def test_what_functions_import_is_listed_with_a_reason_and_nothing_is_listed_in_vain() -> None:
    allowed = defaultdict(set)
    for listed in ALLOWED.values():
        for name, wanted in listed.items():
            allowed[name] |= set(wanted)
    used = defaultdict(set)
    unlisted = []
    for name, found in modules().items():
        for imported in {each for each, late in found if late}:
            by = {prefix for prefix in allowed[name] if imported == prefix or imported.startswith(f"{prefix}.")}
            used[name] |= by
            unlisted += [] if by else [f"{name} imports {imported} in a function"]
    assert unlisted == []
    assert {name: left for name, wanted in allowed.items() if (left := wanted - used[name])} == {}


def test_a_circle_is_found_through_functions_and_not_through_type_checking() -> None:
    known = {"a", "b", "c"}
    sources = {
        "a": "import b",
        "b": "def f():\n    from c import g",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\ndef g():\n    import a",
    }
    edges = {name: {each for each, _ in imports(ast.parse(text), known)} & known for name, text in sources.items()}
    assert edges == {"a": {"b"}, "b": {"c"}, "c": {"a"}}
    assert circles(edges) == [known]
    assert circles(edges | {"c": set()}) == []
