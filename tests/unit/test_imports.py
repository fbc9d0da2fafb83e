"""Who may import whom, read from the source; and that ``import headrace`` stays light.

The rules look at every import statement, also those inside functions and under TYPE_CHECKING; "late" rules look at what runs when a
module is imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

LEAVES = {
    "headrace.errors",
    "headrace.params",
    "headrace.config",
    "headrace.lora",
    "headrace.native",
    "headrace.outputs",
    "headrace.telemetry",
    "headrace.tested",
    "headrace.validation",
    "headrace.version",
}

#: package or module -> what of headrace it may import, besides itself; the longest prefix that fits a module decides
LAYERS = {
    **{leaf: LEAVES for leaf in LEAVES},
    "headrace.checkpoint": LEAVES,
    # What can be watched says so itself, in every package.
    "headrace.tracing": LEAVES,
    "headrace.text": LEAVES | {"headrace.checkpoint"},
    "headrace.ipc": LEAVES | {"headrace.tracing"},
    "headrace.engine": LEAVES | {"headrace.checkpoint", "headrace.tracing"},
    # Grammars are about bytes, which only the tokenizer knows.
    "headrace.engine.guided": LEAVES | {"headrace.engine", "headrace.text"},
    "headrace.engine.model_engine": LEAVES
    | {"headrace.engine", "headrace.checkpoint", "headrace.text", "headrace.tracing", "headrace.selection"},
    "headrace.worker": LEAVES | {"headrace.ipc", "headrace.engine", "headrace.checkpoint", "headrace.tracing"},
    "headrace.worker.postprocess": LEAVES | {"headrace.worker", "headrace.ipc", "headrace.text", "headrace.forms"},
    "headrace.executor": LEAVES | {"headrace.ipc", "headrace.tracing"},
    "headrace.requests": LEAVES | {"headrace.executor", "headrace.text", "headrace.tracing"},
    "headrace.operations": {"headrace.executor"},
    "headrace.llm": LEAVES
    | {
        "headrace.compiled",
        "headrace.operations",
        "headrace.requests",
        "headrace.executor",
        "headrace.text",
        "headrace.checkpoint",
        "headrace.progress",
    }
    | {"headrace.selection"},
    # What an engine folder says of itself is data: all that the user process reads of it.
    "headrace.compiled": LEAVES | {"headrace.checkpoint", "headrace.engine.build.manifest", "headrace.selection"},
    "headrace.progress": LEAVES,
    # It looks for packages by their files; none is imported.
    "headrace.selection": LEAVES,
    # `headrace` itself: the public names; doctor looks at what the executor and the engine would find.
    "headrace.cli": LEAVES | {"headrace", "headrace.llm"},
    # Datasets are prepared without a world.
    "headrace.cli.bench": LEAVES | {"headrace.cli", "headrace.llm", "headrace.bench", "headrace.text", "headrace.checkpoint"},
    # What is compiled and inspected is files: neither needs a world.
    "headrace.cli.build": LEAVES | {"headrace.cli", "headrace.engine.build", "headrace.text"},
    "headrace.cli.inspect": LEAVES | {"headrace.cli", "headrace.compiled", "headrace.engine.build", "headrace.engine.runners.cuda_driver"},
    "headrace.cli.serve": LEAVES | {"headrace.cli", "headrace.checkpoint", "headrace.llm", "headrace.serve"},
    "headrace.forms": LEAVES,
    "headrace.serve": LEAVES | {"headrace.llm", "headrace.executor", "headrace.forms"},
    "headrace.bench": LEAVES | {"headrace.llm", "headrace.requests", "headrace.executor"},
    # It also runs engines without the boundary, in children of its own, which die with it as ranks do.
    "headrace.bench.boundary": LEAVES
    | {
        "headrace.bench",
        "headrace.llm",
        "headrace.executor",
        "headrace.engine",
        "headrace.text",
        "headrace.checkpoint",
        "headrace.worker.guard",
    },
    "headrace.cli._probes": LEAVES
    | {
        "headrace",
        "headrace.cli",
        "headrace.compiled",
        "headrace.executor.launchers.mpi",
        "headrace.checkpoint",
        "headrace.engine.models",
        "headrace.selection",
    },
    # It drives executors of both kinds with what it reads from a file.
    "headrace.cli.replay": LEAVES
    | {"headrace", "headrace.cli", "headrace.executor", "headrace.ipc.recording", "headrace.checkpoint"}
    | {"headrace.compiled", "headrace.selection"},
    # It knows the product from outside: what it compares with shares nothing with the engine.
    "headrace.selftest": LEAVES | {"headrace.llm"},
    "headrace.cli.selftest": LEAVES | {"headrace.cli", "headrace.selftest", "headrace.selection"},
    "headrace.__main__": {"headrace.cli"},
    "headrace": LEAVES | {"headrace.llm", "headrace.executor.launchers.forms"},
}

#: what is imported late itself, and so may import what is slow at once
COMPILERS = {"headrace.engine.runners", "headrace.engine.build"}

#: package of others -> the only places that may import it
OWNERS = {
    # The common design that the boundary is measured against has sockets of its own.
    "zmq": {"headrace.ipc.zmq_channel", "headrace.bench.boundary.baseline"},
    "mpi4py": {"headrace.worker.world"},
    "torch": {"headrace.engine.runners"},
    "onnx": COMPILERS,
    "onnxruntime": COMPILERS,
    "ml_dtypes": COMPILERS,
    "tensorrt": COMPILERS,
    "tensorrt_rtx": COMPILERS,
    "cuda": COMPILERS,
    "aiohttp": {"headrace.serve", "headrace.bench.openai_target"},
    "matplotlib": {"headrace.bench.plots"},
    "nvtx": {"headrace.tracing.nvtx"},
}

#: modules that must not run a thread, a clock or I/O: whatever happens in them can be tested by calling them
PURE = {
    "headrace.executor.ledger",
    "headrace.executor.lifecycle",
    "headrace.executor.ranks",
    "headrace.executor.texts.shard",
    "headrace.forms",
    "headrace.ipc.codec",
    "headrace.engine.cache",
    "headrace.engine.kv_cache",
    "headrace.engine.prefix",
    "headrace.engine.scheduler",
    "headrace.engine.sequence",
    "headrace.engine.slot_cache",
    "headrace.engine.slots",
}
IMPURE = {"threading", "time", "socket", "select", "selectors", "asyncio", "subprocess", "multiprocessing", "os", "zmq", "mpi4py"}

#: never imported at the top of any module, for each takes long or is needed in one kind of process only
LATE = {
    "torch",
    "llguidance",
    "matplotlib",
    "transformers",
    "huggingface_hub",
    "onnx",
    "onnxruntime",
    "ml_dtypes",
    "tensorrt",
    "tensorrt_rtx",
    "cuda",
    "nvtx",
}
#: the same for what ranks consist of: they have no event loop, and every start of a world would pay for it
LATE_IN_RANKS = LATE | {"asyncio"}
RANKS = {"headrace.worker", "headrace.ipc", "headrace.engine", "headrace.tracing"}

#: the links at the top of the checkout are doors for people
DOORS = {"executor", "worker", "ipc", "engine"}


class Import(NamedTuple):
    """``when``: it runs when its module is imported, later, or is for type checkers only."""

    module: str
    line: int
    when: Literal["at once", "late", "never"]


def modules(root: Path) -> dict[str, Path]:
    """Name -> file of every module of the package."""
    found = {}
    for path in sorted((root / "headrace").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> Iterator[Import]:
    """Every import of a module, as absolute module names; ``from package import module`` counts as the module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, when: Literal["at once", "late", "never"]) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - child.level + 1], base]))
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    yield Import(full if full in known else base, child.lineno, when)
            elif not isinstance(child, ast.expr):  # which hold no statements, and are most of all nodes
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                type_only = isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
                yield from visit(child, "never" if type_only or when == "never" else "late" if inside else when)

    yield from visit(ast.parse(path.read_text(), str(path)), "at once")


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def violations(root: Path) -> list[str]:
    """Every broken rule, as ``file:line: what``."""
    found = modules(root)
    all_imports = {name: list(imports(name, path, set(found))) for name, path in found.items()}
    lines = []
    for name, path in found.items():
        layer = max((layer for layer in LAYERS if within(name, {layer})), key=len)
        for module, line, when in all_imports[name]:
            top = module.partition(".")[0]
            where = f"{path.relative_to(root)}:{line}: {name} imports {module}"
            if top == "headrace":
                # The root of the package stands for its public names and not for everything below it.
                allowed = {layer} | LAYERS[layer] - {"headrace"} if layer != "headrace" else LAYERS[layer]
                if not within(module, allowed) and not (module == "headrace" and "headrace" in LAYERS[layer]):
                    lines.append(f"{where}, which {layer} may not")
            elif name in LEAVES and when != "never" and top not in sys.stdlib_module_names | {"msgspec"}:
                lines.append(f"{where}; a leaf needs the standard library and msgspec only")
            if top in OWNERS and not within(name, OWNERS[top]):
                lines.append(f"{where}; only {', '.join(sorted(OWNERS[top]))} may")
            if top in DOORS:
                lines.append(f"{where} by its link at the top of the checkout")
            if name in PURE and top in IMPURE:
                lines.append(f"{where}; it is a pure module")
        if not within(name, COMPILERS):
            lines += late_violations(name, all_imports)
    return lines


def late_violations(name: str, all_imports: dict[str, list[Import]]) -> list[str]:
    """Packages of LATE, or of LATE_IN_RANKS, that are imported as soon as ``name`` is, through any number of modules."""
    late = LATE_IN_RANKS if within(name, RANKS) else LATE
    seen, lines = set(), []
    todo = [(name, [name])]
    while todo:
        module, chain = todo.pop()
        for target, _, when in all_imports[module]:
            if when != "at once":
                continue
            if target.partition(".")[0] in late:
                lines.append(f"{' -> '.join([*chain, target])}: must be imported late")
            # Importing a module imports the packages above it.
            parts = target.split(".")
            for step in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
                if step in all_imports and step not in seen:
                    seen.add(step)
                    todo.append((step, [*chain, step]))
    return lines


def test_the_source_keeps_the_rules():
    assert violations(ROOT) == []


def test_the_modules_that_the_rules_name_exist():
    found = modules(ROOT)
    named = set(LAYERS) | PURE | set.union(*OWNERS.values())
    assert {name for name in named if name not in found} == set()


def tree(root: Path, **files: str) -> Path:
    for name, source in files.items():
        path = root / "headrace" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"errors": "import numpy"}, "a leaf needs"),
        ({"executor__proxy": "from headrace.worker import loop", "worker__loop": ""}, "which headrace.executor may not"),
        ({"executor__proxy": "from ..engine import echo", "engine__echo": ""}, "imports headrace.engine.echo, which"),
        ({"executor__proxy": "def f():\n    import headrace.worker.loop"}, "headrace/executor/proxy.py:2"),
        ({"worker__loop": "from headrace import LLM"}, "imports headrace, which headrace.worker may not"),
        ({"ipc__codec": "import time"}, "it is a pure module"),
        ({"worker__loop": "def f():\n    import zmq"}, "headrace.ipc.zmq_channel may"),
        ({"executor__proxy": "from mpi4py import MPI"}, "only headrace.worker.world may"),
        ({"engine__echo": "def f():\n    import torch"}, "only headrace.engine.runners may"),
        (
            {
                "worker__loop": "from headrace.engine import runner",
                "engine__runner": "from .runners import t",
                "engine__runners__t": "import torch",
            },
            "headrace.worker.loop -> headrace.engine.runner -> headrace.engine.runners.t -> torch: must be imported late",
        ),
        ({"text__hub": "import huggingface_hub"}, "must be imported late"),
        ({"ipc__transport": "import asyncio"}, "headrace.ipc.transport -> asyncio: must be imported late"),
        ({"executor__proxy": "from ipc import codec"}, "by its link"),
        (
            {"executor__proxy": "if TYPE_CHECKING:\n    from headrace.worker import loop", "worker__loop": ""},
            "which headrace.executor may not",
        ),
    ],
)
def test_a_broken_rule_is_found(files, complaint, tmp_path):
    assert any(complaint in line for line in violations(tree(tmp_path, **files)))


@pytest.mark.parametrize(
    "files",
    [
        {"engine__runners__t": "import torch", "worker__main": "def f():\n    from headrace.engine.runners import t"},
        {"errors": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from typing_extensions import Self"},
        {"ipc__a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"},
        {
            "cli__generate": "from headrace import LLM\nfrom headrace.llm import LLM as L\nfrom headrace.cli import other",
            "cli__other": "",
            "llm": "",
        },
    ],
)
def test_what_is_allowed_is_not_found(files, tmp_path):
    assert violations(tree(tmp_path, **files)) == []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50, cwd="/").stdout.strip()


HEAVY = ("torch", "llguidance", "numpy", "zmq", "transformers", "tokenizers", "mpi4py", "jinja2", "tqdm", "asyncio", "msgspec")


def test_importing_headrace_is_light():
    code = f"import sys, headrace; headrace.__version__; dir(headrace); print([m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_making_an_llm_possible_needs_no_torch_and_no_mpi():
    heavy = ("torch", "transformers", "mpi4py", "huggingface_hub")
    code = f"import sys; from headrace import LLM, SamplingParams; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_public_names_are_lazy_complete_and_cached():
    import headrace

    for name in headrace.__all__:
        assert getattr(headrace, name) is getattr(headrace, name)
        assert name in dir(headrace)
    assert set(headrace._HOMES) | {"__version__"} == set(headrace.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        headrace.nothing  # noqa: B018
