"""Strict settings for all tests: an implicit rank promotion or a reused key is an error."""

import collections
import contextlib
import gc
import importlib.metadata
import io
import os
import shutil
from pathlib import Path

# Set before JAX starts. Four devices on the CPU test sharding everywhere. The other flags make
# compilation several times faster: no test measures speed, and they leave the sizes of buffers.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    + " --xla_cpu_parallel_codegen_split_count=1"
)
# The flag is gone in jaxlib 0.12, and XLA ends the process at a flag that it does not know.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["JAX_PLATFORMS"] = "cpu"
# Threads for all devices: with as many as cores, those that wait for each other may never end.
os.environ.setdefault("NPROC", "12")

import hypothesis
import jax
import program_cases
import pytest
from jax.experimental.compilation_cache import compilation_cache
from matplotlib.figure import Figure
from PIL import Image

RENDER = Figure.savefig

gc.disable()  # until tests run: their modules leave no garbage

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
# No time is asserted, that of an example included.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Of a test with the mark ``sweep(n)``, each n-th case stays quick; the others become slow."""
    cases = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark and not item.get_closest_marker("slow"):
            if cases[item.function] % mark.args[0]:
                item.add_marker("slow")
            cases[item.function] += 1


@pytest.fixture(autouse=True, scope="session")
def collect_garbage_rarely():
    """Tracing makes many objects and little garbage: collections took a tenth of the time."""
    keep_libraries()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def keep_libraries():
    """Libraries stay until the end, so that garbage collection need not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """What one file's tests compiled is of no use to the next, and makes the process slower."""
    yield
    jax.clear_caches()
    keep_libraries()


@pytest.fixture
def float64():
    """Enables float64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def allow_key_reuse():
    """Allow several calls with one key, which a comparison needs."""
    with jax.debug_key_reuse(False):
        yield


@pytest.fixture
def allow_rank_promotion():
    """Allow rank promotion, for biases that losses add to arrays of higher rank."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory):
    """The folder where the program keeps what it compiled, for all tests: most train one recipe."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tmp_path_factory.mktemp("shelf")


def blank_png():
    file = io.BytesIO()
    Image.new("L", (1, 1)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def workplace(tmp_path, monkeypatch, compiled_programs):
    """An empty folder to work in, with a recipe in it.

    Pictures of runs are composed but not rendered: that takes a third of the time of a small run.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled_programs))
    (tmp_path / "tiny.py").write_text(program_cases.TINY)
    blank = blank_png()

    def savefig(figure, file, **options):
        if isinstance(file, Path):
            file.write_bytes(blank)
        else:
            RENDER(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    # JAX has read its environment long ago, and looks for a cache only once.
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", True)  # off since a test of --target
    jax.config.update("jax_compilation_cache_dir", str(compiled_programs))
    yield tmp_path
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def rendered(workplace, monkeypatch):
    """Render the pictures of runs."""
    monkeypatch.setattr(Figure, "savefig", RENDER)


@pytest.fixture
def finished_run(workplace, tmp_path_factory, monkeypatch):
    """A finished run of the recipe with its pictures, trained once and copied for each test.

    It prints to ``printed.txt``.
    """
    shelf = tmp_path_factory.getbasetemp() / "finished_run"
    if not shelf.exists():
        output = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(output):
            patch.setattr(Figure, "savefig", RENDER)
            program_cases.fnet_command("train", "tiny.py", "--out", shelf, "--resume")
        (shelf.parent / "printed.txt").write_text(output.getvalue())
    return shutil.copytree(shelf, workplace / "finished_run")
