"""Every example in a docstring runs and prints what it shows; every public name has one."""

import doctest
import importlib
import pkgutil

import pytest
from test_public_names import LISTED, classes, functions

import fnet

LONG = {  # run by make test-all
    *("attribution.ekfac.ekfac", "attribution.trak.trak", "layers.experts.experts"),
    *("autodiff.accumulate.accumulate_grad", "autodiff.fused_optimizer.mode.optimizer_in_backward"),
    *("autodiff.per_example.clipped.ClippedInfo", "backward_pass.recompute"),
    *("interop.huggingface.loading.from_huggingface", "layer.Decode", "layers.mamba2.mamba2"),
    *("layers.stack.stack", "layers.transformer.transformer"),
    "losses.segmentation.pixel_cross_entropy",
    *("memory.fit.remat_to_fit", "models.vit.image_transformer", "optim.compact.compact_adamw"),
    *("privacy.accounting.calibrate_noise_multiplier", "privacy.canaries.GradientCanaries"),
    *("quantization.Quantized", "quantization.dequantize", "quantization.report"),
}

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def examples():
    """Every docstring with an example, once, by the name it is found under."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for info in pkgutil.walk_packages(fnet.__path__, "fnet."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for test in finder.find(module, info.name):
            if test.examples:
                is_long = test.name.removeprefix("fnet.") in LONG
                yield pytest.param(test, id=test.name, marks=[pytest.mark.slow] * is_long)


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_prints_what_it_shows(example):
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    report = []
    runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)


# What functions give: their examples show it.
RESULTS = {
    "fnet.attribution.InRunState", "fnet.autodiff.Mode", "fnet.memory.Buffer", "fnet.memory.Cost",
    "fnet.memory.Candidate", "fnet.memory.Donation", "fnet.memory.LayerResiduals",
    "fnet.memory.Peak", "fnet.memory.Plan", "fnet.memory.Residual", "fnet.memory.Timeline",
    "fnet.models.Denoiser", "fnet.models.LanguageModel",
}  # fmt: skip


def test_every_public_name_has_an_example():
    names = functions() | {n: c for n, c in classes().items() if n in LISTED.keys() - RESULTS}
    assert [name for name, value in names.items() if ">>>" not in value.__doc__] == []
