"""Every public name says what it takes, gives and raises; equations say where they are from."""

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
import types
import typing
from pathlib import Path

import jax
import jaxtyping

import fnet

# Modules that adapt other libraries, and those with a few functions that `fnet` names as a whole.
FILES = (
    "fnet.diffusion.samplers", "fnet.diffusion.schedules", "fnet.interop.jax_privacy",
    "fnet.interop.linen", "fnet.interop.nnx", "fnet.interop.torch",
)  # fmt: skip


def named_in(package):
    """Names that the ``__init__`` of a package defines or passes on, modules aside."""
    module = importlib.import_module(package)
    names = set(getattr(module, "__all__", ()))
    body = ast.parse(Path(module.__file__).read_text()).body
    lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]
    for node in body + lazy:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = {name: getattr(module, name) for name in sorted(names) if not name.startswith("_")}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


PACKAGES = ("fnet", *(info.name for info in pkgutil.walk_packages(fnet.__path__, "fnet.")
            if info.ispkg and not info.name.startswith("fnet.jaxpr")))  # fmt: skip
LISTED = {
    f"{package}.{name}": value for package in PACKAGES for name, value in named_in(package).items()
}
"""What is public: all that an ``__init__`` names, ``fnet.jaxpr`` aside."""

# Equations, and the paper or system each is from.
SOURCES = {
    "fnet.abn": "Rota Bulo, Porzi, Kontschieder, .* CVPR 2018",
    "fnet.accumulate_grad": None,
    "fnet.apply_context": "language model written in Rust",
    "fnet.attribution.InRun": r"Wang, .* 2024",
    "fnet.attribution.fisher_diagonal": r"Kirkpatrick et al\. 2017",
    "fnet.attribution.kfac": r"Martens and Grosse 2015",
    "fnet.attribution.ekfac": r"George et al\. 2018.*Grosse et al\. 2023",
    "fnet.attribution.tracin": r"Pruthi et al\. 2020",
    "fnet.attribution.trak": r"Park et al\. 2023",
    "fnet.autodiff.AdaptiveClipping": "Andrew et al., .* 2021",
    "fnet.autodiff.adapt_clip": r"Andrew et al\. 2021",
    "fnet.autodiff.clipped": r"Abadi et al\. 2016",
    "fnet.autodiff.importance_sampling": r"Katharopoulos and Fleuret 2018",
    "fnet.autodiff.influence": r"Pruthi et al\. 2020",
    "fnet.autodiff.noise_scale": r"McCandlish et al\. 2018",
    "fnet.clipped_grad": r"Abadi et al\. 2016.*Bu et al\. 2023",
    "fnet.diffusion.add_noise": r"Ho et al\. 2020",
    "fnet.diffusion.ddim": "Song, Meng & Ermon, ICLR 2021.*Ho, Jain & Abbeel, NeurIPS 2020",
    "fnet.diffusion.denoised": "Salimans & Ho 2022",
    "fnet.diffusion.denoising_losses": r"Ho et al\. 2020",
    "fnet.diffusion.dpm_solver": r"Lu et al\. 2022",
    "fnet.diffusion.guided": "Ho and Salimans, .* 2022",
    "fnet.diffusion.min_snr_weight": r"Hang et al\., ICCV 2023",
    "fnet.diffusion.sampling_timesteps": r"Lin et al\. 2024",
    "fnet.diffusion.schedules.cosine": "Nichol & Dhariwal, .* 2021",
    "fnet.diffusion.schedules.karras": r"Karras et al\., .* 2022",
    "fnet.diffusion.schedules.linear": "Ho, Jain & Abbeel, .* 2020",
    "fnet.diffusion.target": r"Ho et al\. 2020; Salimans & Ho 2022",
    "fnet.dot_product_attention": "Rabe and Staats 2021",
    "fnet.group_norm": "Wu, He, .* 2018",
    "fnet.layer_norm": "Ba, Kiros, Hinton 2016",
    "fnet.layers.attention": "Vaswani et al., .* 2017",
    "fnet.layers.dynamic_tanh": "Zhu et al., .* 2025",
    "fnet.layers.feed_forward": "Shazeer 2020",
    "fnet.layers.fold": r"Jacob et al\. 2018",
    "fnet.layers.mamba": "Gu and Dao 2023",
    "fnet.layers.gated_delta_net": "Yang, Kautz and Hatamizadeh 2024",
    "fnet.layers.mamba2": "Dao and Gu 2024",
    "fnet.layers.rg_lru": r"De et al\. 2024",
    "fnet.layers.short_conv": r"Amini et al\. 2025",
    "fnet.layers.rotary": r"Su et al\. 2021",
    "fnet.linear_cross_entropy": "Milakov,? Gimelshein 2018",
    "fnet.linear_recurrence": "Blelloch 1990",
    "fnet.losses.cross_entropy": r"Szegedy et al\. 2016",
    "fnet.residual": r"He et al\. 2016",
    "fnet.privacy.PoissonSampling": r"Abadi et al\. 2016",
    "fnet.privacy.add_noise": "Dwork and Roth 2014",
    "fnet.privacy.banded_inverse_square_root": r"Kalinin et al\. 2025",
    "fnet.privacy.banded_square_root": "Kalinin and Lampert 2024",
    "fnet.privacy.epsilon": "Koskela",
    "fnet.reversible": "Gomez, Ren, Urtasun, Grosse, .* 2017",
    "fnet.rms_norm": "Zhang, Sennrich 2019",
    "fnet.selective_scan": "Gu and Dao 2023",
    "fnet.gated_delta_rule": "Yang, Kautz and Hatamizadeh 2024",
    "fnet.state_space_dual": "Dao and Gu 2024",
    "fnet.update_context": "language model written in Rust",
}


@functools.cache
def public():
    """Every public object once, by the name it is found under first."""
    names = dict(LISTED)
    for file in FILES:
        module = importlib.import_module(file)
        names |= {
            f"{file}.{name}": value
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == file
        }
    first = {}
    for name, value in names.items():
        first.setdefault(id(value), (name, value))
    return dict(first.values())


def of_kind(is_kind):
    return {name: value for name, value in public().items() if is_kind(value)}


def functions():
    return of_kind(inspect.isfunction)


def classes():
    return of_kind(lambda value: inspect.isclass(value) and value.__module__.startswith("fnet"))


def section(doc, name):
    """The lines below ``name:``, up to a line that is not indented."""
    found = re.search(rf"^{name}:\n((?:(?:  .*)?\n)*(?:  .*)?)", doc, re.MULTILINE)
    return found[1] if found else ""


def entries(doc, name):
    """What a section says of each name: ``x, y: what`` says it of both."""
    found = re.finditer(
        r"^  ((?:\*{0,2}\w+, )*\*{0,2}\w+): ?(.*(?:\n {4}.*)*)", section(doc, name), re.MULTILINE
    )
    return {one.lstrip("*"): m[2] for m in found for one in m[1].split(", ")}


def holds_array(annotation):
    if annotation is jax.Array:
        return True
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union, tuple):
        return False
    these = typing.get_args(annotation)
    return float not in these and any(map(holds_array, these))  # a number may be traced


def arrays_taken(function):
    """Parameters that are arrays, keys aside: of those neither shape nor dtype is a choice."""
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if holds_array(p.annotation) and not p.name.endswith("key")
    ]


def raised(function):
    """Errors that the function raises, or one of its module's own functions that it calls."""
    tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    todo, looked_at, found = [function.__name__], set(), set()
    while todo:
        name = todo.pop()
        if name in looked_at or name not in own:
            continue
        looked_at.add(name)
        for node in ast.walk(own[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                todo.append(node.func.id)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.add(ast.unparse(node.exc.func))
    return {name for name in found if name.isidentifier() and name != "NotImplementedError"}


def faults(check, names):
    """What is wrong, by name: empty where nothing is."""
    found = {name: check(value, inspect.getdoc(value) or "") for name, value in names.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def test_every_name_has_a_docstring():
    described = of_kind(
        lambda v: inspect.isfunction(v) or inspect.isclass(v) or inspect.ismodule(v)
    )
    assert [name for name, value in described.items() if not value.__doc__] == []


def test_constants_and_types_are_described_below_their_assignment():
    described = set()
    for file in Path(fnet.__file__).parent.rglob("*.py"):
        body = ast.parse(file.read_text()).body
        for node, below in itertools.pairwise(body):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                    described |= {ast.unparse(target) for target in targets}
    rest = (
        public().keys() - functions().keys() - classes().keys() - of_kind(inspect.ismodule).keys()
    )
    assert rest
    assert {name for name in rest if name.rpartition(".")[2] not in described} == set()


def test_every_parameter_of_a_function_is_described():
    def missing(function, doc):
        parameters, described = inspect.signature(function).parameters, entries(doc, "Args")
        return [name for name in parameters if not described.get(name)]

    # One parameter, which the first line names.
    told = {
        name: f
        for name, f in functions().items()
        if len(inspect.signature(f).parameters) > 1
        or not re.search(
            rf"``.*\b{next(iter(inspect.signature(f).parameters), '')}\b.*``", f.__doc__
        )
    }
    assert faults(missing, told) == {}


def test_every_function_says_what_it_gives():
    noun = re.compile(r"(The|A|An|How|Which|What|Whether|Bytes|``)")

    def missing(function, doc):
        given = inspect.signature(function).return_annotation
        if given is None or section(doc, "Returns") or section(doc, "Yields"):
            return None
        if holds_array(given):
            return "no Returns, where arrays are given"
        # A first line that is a noun, or what is made of the input, says it as well.
        return None if noun.match(doc) or "] -> [" in doc else "no Returns"

    assert faults(missing, functions()) == {}


def test_every_error_that_a_function_raises_is_described():
    def missing(function, doc):
        described = section(doc, "Raises")
        return sorted(e for e in raised(function) if not re.search(rf"\b{e}\b", described))

    assert faults(missing, functions()) == {}


def test_every_array_that_a_function_takes_or_gives_has_a_shape():
    elsewhere = r"\blikewise\b|\bas for\b|\bas `|\bof the shape\b|\bsee there\b|\blike ``"

    def missing(function, doc):
        described = entries(doc, "Args")
        wrong = [
            name
            for name in arrays_taken(function)
            if not re.search(rf"\[[^\]]*\]|{elsewhere}", described.get(name, ""))
        ]
        gives = holds_array(inspect.signature(function).return_annotation)
        # "y, with the shape of ``x``" is one.
        given = section(doc, "Returns")
        return wrong + ["Returns"] * (gives and not re.search(r"\[[^\]]*\]|\bshapes?\b", given))

    assert faults(missing, functions()) == {}


def test_every_function_of_arrays_says_their_dtype():
    dtype = re.compile(r"\b(b?float(16|32|64)|u?int(8|32|64)|integers?|bool|floating|dtypes?)\b")

    def missing(function, doc):
        gives = holds_array(inspect.signature(function).return_annotation)
        return bool(arrays_taken(function) or gives) and not dtype.search(doc)

    assert faults(missing, functions()) == {}


def test_every_attribute_and_method_of_a_class_is_described():
    def missing(cls, doc):
        described = entries(doc, "Attributes") | entries(doc, "Args")
        flax = {"parent", "name"}  # which its modules have by themselves
        fields = vars(cls).get("__annotations__", {}).keys() - flax
        fields = sorted(name for name in fields if not name.startswith("_"))
        if isinstance(vars(cls).get("__init__"), types.FunctionType) and not fields:
            fields = list(inspect.signature(cls.__init__).parameters)[1:]
        methods = [
            name
            for name, value in vars(cls).items()
            if not name.startswith("_")
            and name not in fields
            and (inspect.isfunction(value) or isinstance(value, property))
            and not inspect.getdoc(value)
        ]
        return [name for name in fields if not described.get(name)] + methods

    assert faults(missing, classes()) == {}


def test_every_equation_is_written_down_and_says_where_it_is_from():
    def is_missing(name):
        doc = inspect.getdoc(names[name])
        # In a block, within a sentence, or as the first line.
        is_written = re.search(r"\n\n +\S|``[^`]* = [^`]*``|\A``", doc)
        return not (is_written and re.search(SOURCES[name] or "", " ".join(doc.split())))

    names = functions() | classes()
    assert list(filter(is_missing, SOURCES)) == []


def test_at_most_200_names_are_public():
    assert len(LISTED) <= 200


def test_modules_of_packages_that_import_late_are_attributes():
    code = (
        "import fnet; print(fnet.fsdp.__name__, fnet.memory.target.__name__, hasattr(fnet, 'no'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["fnet.fsdp", "fnet.memory.target", "False"]
