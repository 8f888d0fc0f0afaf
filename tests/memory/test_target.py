import os
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from fnet.memory import donation, peak, target
from fnet.memory.target import TARGETS, Gpu, Tpu

GPUS = [name for name, known in TARGETS.items() if isinstance(known, Gpu)]
TPUS = [name for name, known in TARGETS.items() if isinstance(known, Tpu)]


@pytest.fixture(autouse=True)
def _fresh():
    target._gpu.cache_clear()
    target._tpu.cache_clear()


@pytest.fixture
def without_compilers(monkeypatch):
    """Descriptions are checked, but no compiler is loaded."""
    monkeypatch.setattr(target, "_gpu", lambda name, text, topology: jax.local_devices()[1:])


def here():
    return target.Target("here", jax.local_devices()[1], 2**30, {})


# float32 TFLOP/s and GB/s from NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM, L4, T4)
# and the Ada and Blackwell white papers. The data sheet of the B200 says "up to".
DATA_SHEETS = {
    "a100": (19.5, 2039),
    "h100": (67, 3350),
    "h200": (67, 4800),
    "rtx4090": (82.6, 1008),
    "rtx5090": (104.8, 1792),
    "l4": (30.3, 300),
    "t4": (8.1, 320),
}


def test_properties_of_a_gpu_agree_with_its_data_sheet():
    for name, (teraflops, gigabytes) in DATA_SHEETS.items():
        gpu = TARGETS[name]
        lanes = int(re.search(r"fpus_per_core: (\d+)", gpu.as_text())[1])
        assert 2 * gpu.cores * lanes * gpu.clock_ghz / 1e3 == pytest.approx(teraflops, rel=0.01)
        assert gpu.bandwidth / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_rejects_an_unknown_target_and_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"expected one of \['a100', 'h100', .*'v6e'\], got 'h900'"
    ):
        target.describe("h900")


@pytest.mark.usefixtures("without_compilers")
def test_describe_reads_the_text_of_a_known_gpu_without_comments_and_strings():
    for name in GPUS:
        assert target.describe(name).memory == TARGETS[name].memory
    text = TARGETS["h100"].as_text()
    text = text.replace("NVIDIA H100", r"# \" device_memory_size: 7 \"")
    text = "# device_memory_size: 8, or { more\n" + text
    assert target.from_text("mine", text).memory == TARGETS["h100"].memory


def test_rejects_a_description_that_lacks_a_needed_property():
    # With jax 0.10.2, XLA dies of SIGFPE without threads_per_warp or block_dim_limit_x. Without
    # the others it gives an unclear error or wrong numbers.
    for field in (*target._NEEDED, "cuda_compute_capability", "platform_name"):
        text, replaced = re.subn(rf"\b{field}\b", "unknown", TARGETS["h100"].as_text())
        assert replaced == 1
        with pytest.raises(ValueError, match=rf"mine: expected a GPU's .* missing: {field}"):
            target.from_text("mine", text)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("readme", None, "# A graphics card\nIt has 24 GB.", r"GpuTargetConfigProto in text, .*gpu_target_config.pbtxt of XLA_FLAGS=.*: all of it$"),
        ("mi300", '"CUDA"', '"ROCM"', 'expected platform_name: "CUDA", got "ROCM"'),
        ("mine", "threads_per_warp: 32", "threads_per_warp: 0", r"missing: threads_per_warp$"),
        ("mine", "l2_cache_size", "l2_cash_size", r"mine: XLA's compiler \(jax .*\) cannot read"),
    ],
)  # fmt: skip
def test_rejects_descriptions_that_are_damaged_or_of_something_else(name, old, new, message):
    if old == "l2_cache_size":
        described("h100")  # which needs XLA's compiler
    text = TARGETS["h100"].as_text()
    with pytest.raises(ValueError, match=message) as error:
        target.from_text(name, new if old is None else text.replace(old, new))
    assert old or "\n" not in str(error.value)


def test_a_missing_compiler_names_the_extra_to_install(monkeypatch):
    def missing(*_, **__):
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(target.topologies, "get_topology_desc", missing)
    monkeypatch.setattr(target.metadata, "entry_points", lambda group: [])
    for name, extra in (("h200", "target-gpu"), ("v6e", "target-tpu")):
        with pytest.raises(RuntimeError, match=rf'{name}: .*pip install "fnet-jax\[{extra}\]"$'):
            target.describe(name)


def test_loads_a_plugin_that_jax_skipped_because_cuda_libraries_are_missing(monkeypatch):
    skip = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    monkeypatch.delenv(skip, raising=False)
    loaded = []

    class Plugin:
        name = "xla_cuda13"

        def load(self):
            return self

        def initialize(self):
            loaded.append(os.environ[skip])

    def get_topology_desc(*_, **__):
        if not loaded:
            raise NotImplementedError("topology not implemented for cuda")
        return topologies.TopologyDescription(jax.local_devices())

    monkeypatch.setattr(target.topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(target.metadata, "entry_points", lambda group: [Plugin()])
    assert target.describe("h100").device == jax.local_devices()[0]
    assert loaded == ["1"]
    assert skip not in os.environ


def test_missing_cuda_tools_name_the_extra_to_install(monkeypatch):
    here = topologies.TopologyDescription(jax.local_devices())
    monkeypatch.setattr(target.topologies, "get_topology_desc", lambda *_, **__: here)
    for message, short in (
        ("INTERNAL: libdevice not found at ./libdevice.10.bc", "libdevice.10.bc"),
        ("UNAVAILABLE: No PTX compilation provider is available.\n - path: none", "is available"),
        ("UNIMPLEMENTED: /bin/ptxas ptxas too old. Falling back to the driver.", "ptxas too old"),
    ):

        def fails(*_, text=message, **__):
            raise jax.errors.JaxRuntimeError(text)

        target._gpu.cache_clear()
        monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
        with pytest.raises(RuntimeError, match=rf'^l4: .*{short}\): pip install .*target-gpu\]"'):
            target.describe("l4")


def test_shapes_on_keeps_dtypes_and_places_on_the_target():
    tree = {"x": jnp.ones((2, 3), jnp.bfloat16), "key": jax.random.key(0)}
    placed = target.shapes_on(here(), tree)
    assert placed["x"].dtype == jnp.bfloat16
    assert all(s.sharding.device_set == {jax.local_devices()[1]} for s in placed.values())


def doubled_on_the_host(on_host, x):
    assert jax.typeof(on_host).memory_space == jax.memory.Space.Host
    here = jax.device_put(on_host, jax.memory.Space.Device) * 2 + x
    return jax.device_put(here, jax.memory.Space.Host)


def test_what_is_on_the_host_is_traced_there():
    on_host, x = jax.device_put(jnp.ones(8), jax.memory.Space.Host), jnp.ones(8)
    compiled = target.compile_for(here(), jax.jit(doubled_on_the_host), on_host, x)
    assert compiled.out_info.sharding.memory_kind == "pinned_host"


def test_compile_for_a_target_keeps_the_donation():
    f = jax.jit(lambda state, x: ({"w": state["w"] + x.sum()}, x.sum()), donate_argnums=0)
    compiled = target.compile_for(here(), f, {"w": jnp.ones((8, 8))}, jnp.ones(4))
    assert donation(compiled) == (256, 1)


@pytest.mark.parametrize(("guesses", "calls"), [(True, 2), (False, 1)])
def test_a_product_without_tiles_is_compiled_with_cublas(guesses, calls, monkeypatch):
    class NoTiles(jax.errors.JaxRuntimeError):
        error_code_string = "INTERNAL"

    tried = []

    def compile(_, compiler_options):
        tried.append(compiler_options)
        if "xla_gpu_enable_triton_gemm" not in compiler_options:
            raise NoTiles("Couldn't find output tile sizes")
        return "compiled"

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    lowered = jax.jit(jnp.sin).lower(1.0)
    options = {"xla_gpu_autotune_level": 0} if guesses else {}
    if guesses:
        assert target.compile_lowered(lowered, options) == "compiled"
        assert tried[-1] == {**options, "xla_gpu_enable_triton_gemm": False}
    else:
        with pytest.raises(NoTiles):
            target.compile_lowered(lowered, options)
    assert len(tried) == calls


def test_rejects_a_program_without_array_arguments():
    with pytest.raises(ValueError, match="needs an array argument"):
        target.compile_for(here(), jax.jit(lambda: 1))


def described(name):
    """The target, if fnet-jax[target-gpu,target-tpu] is installed."""
    try:
        return target.describe(name)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", GPUS)
def test_memory_of_a_program_for_a_gpu(name):
    gpu = described(name)
    f = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cumsum(x, 0)))), donate_argnums=0)
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = target.compile_for(gpu, f, x)
    assert gpu.device.device_kind == TARGETS[name].device
    assert gpu.usable == 3 * gpu.memory // 4
    assert peak(compiled).arguments == donation(compiled).aliased_bytes == x.size * 4
    assert x.size * 4 <= peak(compiled).temporaries <= 3 * x.size * 4


@pytest.mark.parametrize("name", GPUS[:1])
def test_what_is_on_the_host_takes_no_memory_of_a_described_gpu(name):
    on_host, x = jax.device_put(jnp.ones(2**20), jax.memory.Space.Host), jnp.ones(2**20)
    f = jax.jit(doubled_on_the_host, donate_argnums=0)
    compiled = target.compile_for(described(name), f, on_host, x)
    assert peak(compiled).arguments == 2**22
    assert compiled.memory_analysis().host_alias_size_in_bytes == 2**22


@pytest.mark.parametrize("name", TPUS)
def test_memory_of_a_tpu_is_what_its_compiler_allows(name):
    tpu = described(name)
    too_large = jax.ShapeDtypeStruct((2**30, 256), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        target.compile_for(tpu, jax.jit(jnp.sin), too_large)
    gibibytes = re.search(r"available HBM \(([\d.]+)G\)", str(error.value))[1]
    # Versions of libtpu differ by 10 MiB.
    assert tpu.usable == tpu.memory == pytest.approx(float(gibibytes) * 2**30, rel=1e-3)


def test_devices_of_a_tpu_target_are_the_first_of_its_slice(monkeypatch):
    slices = {("v6e:2x2", "tpu"): types.SimpleNamespace(devices=jax.local_devices()[1:])}
    monkeypatch.setattr(target.topologies, "get_topology_desc", lambda *name: slices[name])
    tpu, known = target.describe("v6e", 3), TARGETS["v6e"]
    assert tpu.devices == (tpu.device, *jax.local_devices()[2:4])
    assert (tpu.device, tpu.memory, tpu.peaks) == (
        jax.local_devices()[1],
        known.memory,
        known.peaks,
    )


def test_unknown_devices_are_estimated_at_the_rates_of_an_h100():
    def on(kind, peaks=None):
        return target.Target("x", types.SimpleNamespace(device_kind=kind), 0, {}, peaks=peaks)

    known, h100 = (TARGETS[name] for name in ("a100", "h100"))
    assert target.peaks_of(on(known.device)) == known.peaks != h100.peaks
    assert target.peaks_of(on(known.device, h100.peaks)) == h100.peaks
    assert target.peaks_of(on("another")) == target.peaks_of(None) == h100.peaks
