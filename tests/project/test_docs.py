"""What the pages say holds: their code runs, their commands parse, their names are all there are."""

import contextlib
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import pytest
import vision_cases
import yaml
from pretrained_folder import LLAMA, write_folder, write_tokenizer
from program_cases import fnet_command
from registry_cases import copy_tables
from test_public_names import LISTED

from benchmarks import readme
from train import arguments
from train.config import DeepLab, recipes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
API = sorted((DOCS / "api").glob("*.md"))
WIDTH = 80  # columns of code that the site shows
CODE = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)
PRINTED = re.compile(r"\n\n```text\n(.*?)```", re.DOTALL)  # below the code that prints it
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


LONG = {  # run by make test-all
    *("sequence_models", "bigger_network", "private_training", "language_model", "flax", "haiku"),
    *("equinox", "per_example", "memory", "savings", "train_steps", "predict", "wrong_labels"),
    *("add_an_activation", "add_a_recipe", "budget", "nnx_transformer", "migrate", "add_a_layer"),
    *("lora", "language_models", "out_of_memory", "weights", "private_sharp_edges"),
    *("correlated_noise", "own_model_on_devices"),
}


def name_of(page):
    return str(page.relative_to(ROOT))


def asset(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "assets" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_api_pages_have_the_signatures_and_first_lines_of_the_code(page):
    text = page.read_text()
    assert asset("api_pages").with_lines(text) == text, "run python docs/assets/api_pages.py"


def test_the_page_of_private_runs_has_each_file_and_line_of_the_code():
    text = (DOCS / "private_files.md").read_text()
    assert asset("run_files").with_tables(text) == text, "run python docs/assets/run_files.py"


def with_code():
    for page in PAGES:
        if CODE.search(page.read_text()):
            marks = [pytest.mark.slow] if page.stem in LONG else []
            yield pytest.param(page, marks=marks, id=name_of(page))


@pytest.mark.parametrize("page", list(with_code()))
def test_the_python_of_a_document_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages may write files
    copy_tables(monkeypatch)  # to which some pages add
    if page.stem == "language_models":  # the page reads a model that the reader exported
        write_folder(tmp_path / "models" / "mine", LLAMA, ml_dtypes.bfloat16)
        if importlib.util.find_spec("tokenizers"):
            write_tokenizer(tmp_path / "models" / "mine" / "tokenizer.json")
    if page.stem == "predict":  # the page reads the run that the reader trained
        fnet_command("train", "digits_mlp", "--train.steps", 400, "--out", "runs/digits")
    if page.stem == "segmentation":  # the page reads the run that it trained
        monkeypatch.setattr(DeepLab, "build", vision_cases.small)
        vision_cases.write_shapes_run(tmp_path)
    if page.stem not in LONG:
        run_code(page)
        return
    # As a reader runs it: in a process of its own, on one device.
    program = f"import pathlib, test_docs; test_docs.run_code(pathlib.Path({str(page)!r}))"
    devices = 8 if page.stem == "own_model_on_devices" else 1
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "NPROC": "32",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    if needed := re.search(r"Skipped: (.*)", done.stderr):
        pytest.skip(needed[1])
    assert done.returncode == 0, done.stderr


def run_code(page):
    """Run the blocks of a page, and compare what they print."""
    names = {"__name__": page.name}
    text = page.read_text()
    for i, block in enumerate(CODE.finditer(text)):
        needed, code = block.groups()
        if needed:
            pytest.importorskip(needed)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page.name}, block {i}", "exec"), names)
        if shown := PRINTED.match(text, block.end()):
            assert_prints(printed.getvalue(), shown[1])


def assert_prints(printed, shown):
    """Compare words exactly. Numbers may depend on the machine and on versions."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    numbers = [
        [float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (printed, shown)
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.25, abs=0.02)


def test_a_shown_output_is_compared():
    assert_prints("12,000 bytes\nloss 1.47\n", "12,100 bytes\nloss 1.46\n")
    with pytest.raises(AssertionError):
        assert_prints("loss 1.47\n", "accuracy 1.47\n")
    with pytest.raises(AssertionError):
        assert_prints("loss 1.47\n", "loss 2.47\n")


@pytest.mark.slow
def test_programs_of_the_readme_print_what_it_shows():
    text = (ROOT / "README.md").read_text()
    shown = readme.published(text)
    assert list(shown) == ["-", "+"]
    for sign, program in readme.programs(text).items():
        size, _ = readme.run(program)
        assert abs(size - shown[sign][0]) <= 0.05 * shown[sign][0]


def test_first_page_of_the_site_has_the_readme_with_links_from_docs():
    page = asset("first_page").on_page_markdown((DOCS / "index.md").read_text())
    assert "\n# fnet\n" in page
    assert page.count("## Where to start\n") == 1
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page)
    assert {"assets/memory-light.svg", "assets/memory-dark.svg"} <= set(links)
    for link in links:
        assert (DOCS / link).exists(), link


def test_code_fits_the_columns_of_the_site():
    block = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
    shown = {name_of(page): block.findall(page.read_text()) for page in PAGES}
    code = {name: [text for _, text in blocks] for name, blocks in shown.items()}
    for page in DOCS.rglob("*.ipynb"):
        for cell in json.loads(page.read_text())["cells"]:
            if cell["cell_type"] == "code":
                outputs = [line for output in cell["outputs"] for line in output.get("text", ())]
                code.setdefault(name_of(page), []).append(
                    "".join([*cell["source"], "\n", *outputs])
                )
    for module in (ROOT / "fnet").rglob("*.py"):
        prompts = re.findall(r"^ *((?:>>>|\.\.\.)(?: .*)?)$", module.read_text(), re.MULTILINE)
        code[name_of(module)] = prompts
    long = [
        f"{name}: {line}"
        for name, blocks in code.items()
        for text in blocks
        for line in text.splitlines()
        if len(line) > WIDTH
    ]
    assert not long, "\n".join(long)


def test_a_private_program_has_17_lines():
    page = (DOCS / "tutorials" / "private_training.md").read_text()
    section = page[page.index("## Your own flax model") : page.index("## Publish the parameters")]
    _, (_, program), _ = CODE.findall(section)
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) == 17
    assert max(map(len, lines)) <= WIDTH


def blocks():
    """The lines of every block of commands that a page shows, with the page."""
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            yield page.name, block.replace("\\\n", " ").splitlines()


def commands():
    """Every ``fnet`` command that a page shows, with the page."""
    for page, lines in blocks():
        for line in lines:
            if line.startswith("fnet ") and "$" not in line and "..." not in line:
                yield page, [w for w in shlex.split(line, comments=True) if w != "&"]


OF_A_RECIPE = {"train": arguments.TrainArguments, "memory": arguments.MemoryArguments}
OF_A_RECIPE |= {"import": arguments.ImportArguments}
READ = {"eval": arguments.EvalArguments, "report": arguments.ReportArguments}
READ |= {"predict": arguments.PredictArguments, "export": arguments.ExportArguments}
READ |= {"fit": arguments.FitArguments}


PLUGINS = ("add_a_dataset", "add_a_gradient_mode", "add_a_network", "add_an_activation")
"""Pages whose first block is a file that adds to fnet."""


def test_every_command_of_a_document_can_be_read(monkeypatch):
    copy_tables(monkeypatch)
    for page in PLUGINS:
        exec(CODE.search((DOCS / "how_to" / f"{page}.md").read_text())[2], {"__name__": page})
    read = set()
    for page, command in commands():
        program, what, *words = command
        options = words[next((i for i, w in enumerate(words) if w.startswith("--")), len(words)) :]
        try:
            if what in OF_A_RECIPE and words[0] in recipes.recipes():
                if "--help" not in words:
                    recipe = recipes.load(words[0])
                    _, config = arguments.read_with_config(
                        OF_A_RECIPE[what], recipe, options, program
                    )
                    steps, warmup = config.train.steps, config.optim.warmup_steps
                    assert steps is None or warmup <= steps, f"warmup_steps {warmup}"
                read.add(what)
            elif what in READ or what == "sample":
                text = arguments.TextArguments if "--prompt" in words else arguments.ImageArguments
                arguments.read(READ.get(what, text), options, program)
                read.add(what)
        except Exception as error:
            raise AssertionError(f"{page}: {' '.join(command)}: {error}") from error
    assert read >= {*OF_A_RECIPE, "eval", "report", "predict", "sample"}


def test_no_two_runs_of_a_block_begin_in_the_same_folder():
    read = 0
    for page, lines in blocks():
        begun = {}
        for line in lines:
            words = shlex.split(line, comments=True) if "fnet train " in line else []
            if "fnet" not in words or {"--resume", "--help"} & set(words):
                continue
            given = words[words.index("fnet") + 2]
            known = given in recipes.recipes()
            name = recipes.load(given).name if known else Path(given).stem
            value = dict(itertools.pairwise(words))
            out = value.get("--out", f"runs/{name}")
            begun.setdefault(out, []).append(value.get("--process"))
        for out, processes in begun.items():
            # Those that train together have one folder.
            together = None not in processes and len(set(processes)) == len(processes)
            assert len(processes) == 1 or together, f"{page}: two runs in {out}"
            read += 1
    assert read > 20


def found(name):
    """What a dotted name means: what a room exports, before a module that is called the same."""
    first, *rest = name.split(".")
    value, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return value


def entries():
    return [name for p in API for name in asset("api_pages").ENTRY.findall(p.read_text())]


def test_every_public_name_is_in_the_reference():
    told = {id(found(name)) for name in entries()}
    adapters = [f"fnet.interop.{name}.InPlaceABN" for name in ("linen", "nnx")]
    assert [name for name in (*LISTED, *adapters) if id(found(name)) not in told] == []


def test_an_entry_of_the_reference_exists_and_is_the_only_one():
    names = entries()
    assert len(names) == len(set(names))
    functions = [found(name) for name in names if inspect.isroutine(found(name))]
    assert len(functions) == len(set(functions)) > 100


def pages_in(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values():
                yield from pages_in([below] if isinstance(below, str) else below)


def test_every_page_is_in_the_navigation():
    nav = list(pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    made = {page.with_suffix(".md") for page in DOCS.rglob("*.ipynb")}
    pages = {*DOCS.rglob("*.md"), *made, DOCS / "benchmarks" / "benchmarks.md"}
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in pages)


def test_what_the_readme_links_to_is_there():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), f"README.md: {link}"


def test_the_map_has_paths_that_exist_and_every_module_of_the_library():
    tree = re.search(r"```\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)[1]
    parents, named = [], set()
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        parents = [*parents[: len(indent) // 2], name]
        path = ROOT.joinpath(*parents)
        assert path.is_dir() if name.endswith("/") else path.is_file(), path
        named.add(path)
    assert {ROOT / name for name in ("fnet", "train", "tests", "configs")} <= named
    for folder in ("fnet", "fnet/autodiff", "fnet/memory", "fnet/jaxpr"):
        modules = {*(ROOT / folder).glob("[a-z]*.py")}
        assert modules <= named, f"not on the map: {sorted(map(str, modules - named))}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
    for page in tmp_path.rglob("*.html"):
        scripts = re.findall(
            r'<(?:script|link|img)[^>]* (?:src|href)="(https?:[^"]*)', page.read_text()
        )
        assert scripts == [], page  # readers need no other server
    assert "<math" in (tmp_path / "private_training" / "index.html").read_text()
