"""Imports go down, in no circle, and change nothing in the process."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = {
    "fnet": (
        *("__main__", "testing", "interop", "models"),
        *("layers generate lora step", "fsdp loop_sums", "state", "layer", "attribution privacy"),
        *("autodiff memory", "represented", "quantization", "diffusion losses noise optim"),
        *("nonfinite cpu backward_pass", "jaxpr"),
        "precision mesh hlo measured checks chunks lazy",
    ),
    "train": (
        *("__main__", "cli", "commands", "predictor", "report", "run", "output", "tasks"),
        *("gradients", "networks", "data", "arguments", "config", "privacy platform onnx_program"),
        *("stored", "limits", "errors"),
    ),
}
"""Packages and modules from the top. One imports only those behind it, and none beside it."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in FLOORS
    for path in (ROOT / top).rglob("*.py")
}


def imports(module):
    """Modules that a module of fnet or train imports, for annotations alone, too."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= whole if whole <= {*MODULES} else {node.module, *whole}
    return names & {*MODULES} - {module}


IMPORTS = {module: imports(module) for module in MODULES}


def test_imports_go_down():
    for top, floors in FLOORS.items():
        floor_of = {name: i for i, floor in enumerate(floors) for name in floor.split()}
        package_of = {name: name.split(".")[1] for name in MODULES if name.startswith(f"{top}.")}
        assert {*package_of.values()} == {*floor_of}
        for module, above in package_of.items():
            for name in IMPORTS[module] & {*package_of}:
                below = package_of[name]
                assert above == below or floor_of[above] < floor_of[below], f"{module}: {name}"


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_public_names_are_imported_when_they_are_used():
    code = """
import fnet, fnet.memory, fnet.privacy, fnet.interop, sys
assert {"generate", "abn", "memory", "__version__"} <= {*dir(fnet)}
assert fnet.memory.parse_bytes("1KiB") == 1024 and "jax" not in sys.modules
import fnet.generate, fnet.memory.plan  # modules with the name of a function
assert callable(fnet.generate) and callable(fnet.memory.plan)
assert fnet.layers.dense and fnet.privacy.epsilon and not hasattr(fnet, "dense")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


OUTSIDE = {"ctypes", "io", "logging", "os", "pathlib", "shutil", "subprocess", "tempfile", "time"}
"""Modules that reach out of a function: to files, output, the clock or the process."""
REACHES_OUT = {
    "__main__.py": {"pathlib"},  # the launcher of the program
    "cpu/heap.py": {"ctypes"},
    "memory/plan.py": {"os"},  # the number of CPUs
    "memory/target.py": {"os"},  # the environment, while a compiler is loaded
    "privacy/accounting.py": {"logging"},  # dp_accounting's warnings
    "testing.py": {"pathlib"},  # baselines beside a test
}
"""The exceptions that docs/architecture.md names."""


def test_the_library_is_pure_but_for_the_exceptions_on_the_map():
    found = {}
    for path in sorted((ROOT / "fnet").rglob("*.py")):
        text, names = path.read_text(), set()
        assert "cpu.heap" not in text, path  # only the program changes it
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names} & OUTSIDE
            elif isinstance(node, ast.ImportFrom):
                names |= {(node.module or "").split(".")[0]} & OUTSIDE
            elif isinstance(node, ast.Global):
                names.add("global")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names |= {node.func.id} & {"open", "print"}
        if names:
            found[str(path.relative_to(ROOT / "fnet"))] = names
    assert found == REACHES_OUT


REGISTRIES = {
    *("fnet.interop.huggingface.family.FAMILIES", "train.config.registry._KINDS"),
    *("train.config.registry._VARIANTS", "train.config.registry._plugins"),
}
"""Tables that begin empty: modules and users add definitions."""


def test_no_module_has_state_but_registries():
    found = {
        f"{module}.{ast.unparse(getattr(node, 'targets', None) or node.target)}"
        for module, path in MODULES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        if ast.unparse(node.value) in ("{}", "[]", "set()", "dict()", "list()")
    }
    assert found == REGISTRIES


WATCHED = """
import os, signal, sys, warnings, jax, PIL.Image, tensorstore
from logging import root; loggers = root.manager.loggerDict
import grain, matplotlib.pyplot, optax, orbax.checkpoint, pydantic, rich, sklearn.metrics, tyro
def state():
    return {
        "log levels": {n: log.level for n, log in loggers.items() if getattr(log, "level", 0)},
        "Pillow": PIL.Image.MAX_IMAGE_PIXELS,
        "TensorStore": tensorstore.experimental_collect_matching_metrics,
        "hooks": (sys.excepthook, sys.unraisablehook, signal.getsignal(signal.SIGINT)),
        "settings": (*warnings.filters, dict(os.environ), dict(matplotlib.rcParams)),
        "JAX": dict(jax.config.values),
    }

before = state()
for name in sys.argv[1:]:
    try: __import__(name)
    except ModuleNotFoundError as error: assert error.name.split(".")[0] not in ("fnet", "train")
after = state()
print(*(name for name in before if before[name] != after[name]), sep=", ")
"""


def test_imports_change_nothing_in_the_process():
    names = sorted(name for name in MODULES if not name.endswith("__main__"))
    command = [sys.executable, "-c", WATCHED, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("\n", 0), run.stdout + run.stderr
