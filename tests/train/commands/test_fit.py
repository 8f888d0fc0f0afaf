"""``fnet fit``: ways to fine-tune a published model, from config.json and headers alone."""

import dataclasses
import json
import types
from typing import get_args

import jax
import ml_dtypes
import numpy as np
import pytest
from pretrained_folder import LLAMA, write_folder
from program_cases import assert_one_line_error, exit_code, output_of

from fnet.interop.huggingface import build_model
from fnet.memory import tree_bytes
from fnet.memory.target import Target
from train import arguments
from train.arguments import TrainArguments
from train.config import recipes
from train.data.model_folder import FileTensor, ModelFolder, read_folder
from train.networks.published import network as published
from train.run import fine_tuning as fit
from train.run import planning
from train.run.fine_tuning import Cost, Shape
from train.run.setup import setup

DEEP = LLAMA | {"num_hidden_layers": 4}
QWEN_2_5_0_5B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "max_window_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06, "rope_theta": 1e6, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def folder(workplace):
    write_folder(workplace / "llama", DEEP, ml_dtypes.bfloat16)
    return workplace


@pytest.fixture
def no_weights(monkeypatch):
    def read(self, index):
        raise AssertionError("a weight is read")

    monkeypatch.setattr(FileTensor, "__getitem__", read)


def headers_of(path, config):
    """A folder with the config of a published model and a file of headers, which takes no space."""
    network = build_model(config)
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {
        t.name: FileTensor(path, 0, t.file_shape, dtype) for t in network.tensors if not t.optional
    }
    blocks = config["num_hidden_layers"]
    fit.write_shallow(fit.Model(ModelFolder(path, config, tensors), blocks, 1, None), blocks, path)
    return path


def planner_of(model, limit, depths=(1, 2), shallow=None):
    return fit.Planner(
        model, limit, 16, None, depths, shallow, lambda line: None, lambda line: None
    )


@pytest.mark.slow
def test_the_estimate_is_close_to_all_blocks_compiled(folder):
    model = fit.read_model(folder / "llama")
    shape, context = Shape("nested", 2, 256), 256
    shallow = folder / "shallow"
    shallow.mkdir()
    planners = [planner_of(model, 2**40, model.depths(exact), shallow) for exact in (False, True)]
    row = planners[0].state("lora", context, 2)
    with jax.debug_key_reuse(False):  # the backward pass of nested remat draws the same again
        estimate, exact = (
            planner.cost(row, shape, 2).peak - row.state_bytes for planner in planners
        )
    assert estimate == pytest.approx(exact, rel=0.1)


def test_blocks_that_are_not_compiled_are_added(folder, monkeypatch):
    def analyze(run, *args, **kwargs):
        depth = int(run.config.model.path.rpartition("/")[2])
        total = 700 + 300 * depth + tree_bytes(run.state_shapes)
        report = types.SimpleNamespace(peak=types.SimpleNamespace(total=total))
        executable = types.SimpleNamespace(report=report, compiled=compiled)
        return types.SimpleNamespace(executable=executable)

    compiled = jax.jit(abs).lower(1.0).compile()
    monkeypatch.setattr(planning, "analyze", analyze)
    model, shallow = fit.read_model(folder / "llama"), folder / "shallow"
    shallow.mkdir()
    planner = planner_of(model, 2**40, (1, 2), shallow)
    row = planner.state("lora", 64, 4)
    linear, nested, offloaded = (
        planner.cost(row, Shape(policy, 2, 64), 4).peak - row.state_bytes
        for policy in ("none", "nested", "offload")
    )
    assert linear == 700 + 300 * 4
    # In groups of two, three inputs are held, two more than of one block, and a float32 gradient.
    inputs = 2 * LLAMA["hidden_size"] * (64 * 4 // 2) * (2 + 2)
    adapters = row.trained  # alike in each of four blocks
    assert nested == 700 + 300 + inputs + 4 * adapters * 3 // 4
    assert offloaded == 700 + 300 * 2 + 4 * adapters * 2 // 4


def test_a_state_above_the_budget_is_not_compiled(folder, capsys, monkeypatch, no_weights):
    monkeypatch.setattr(planning, "analyze", None)
    printed = output_of(capsys, "fit", "llama", "--budget", "1kB", "--ways", "lora", "lora_nf4")
    assert "too large" in printed
    assert "fnet train" not in printed
    assert "For training, llama has no tokenizer.json; download it" in printed


# Searching a shape, with costs that are known.


def searched(folder, monkeypatch, way, limit, cost):
    model = fit.read_model(folder / "llama")
    tried = []

    def known(self, row, shape, batch_size):
        tried.append(shape)
        return Cost(row.state_bytes + cost(shape), None)

    monkeypatch.setattr(fit.Planner, "cost", known)
    state = planner_of(model, 0).state(way, 32, 4).state_bytes
    *_, rows = planner_of(model, state + limit).search([way], 32, 4)
    return rows[way], tried


def per_token(none, segments, nested, fixed=0, gradients=0):
    def cost(shape):
        tokens = shape.context * 4 // shape.microbatches
        rate = {"none": none, "segments": segments, "nested": nested}[shape.policy]
        return fixed + rate * tokens + (gradients if shape.microbatches > 1 else 0)

    return cost


def test_chooses_no_remat_if_it_fits(folder, monkeypatch):
    row, tried = searched(folder, monkeypatch, "lora", 3600, per_token(100, 50, 40, fixed=400))
    assert row.shape == Shape("none", 4, 32)
    assert row.longest == 80  # 400 + 40 * 80 = 3600
    assert tried == [Shape("none", 4, 32), Shape("nested", 4, 128), Shape("nested", 4, 32)]


def test_chooses_as_little_remat_as_it_must(folder, monkeypatch):
    row, _ = searched(folder, monkeypatch, "lora", 1070, per_token(100, 20, 10, fixed=400))
    assert row.shape == Shape("segments", 4, 32)
    assert row.longest == 64  # 67 tokens, rounded down to a multiple of 16
    assert "--memory.policy segments" in " ".join(row.flags)
    row, _ = searched(folder, monkeypatch, "lora", 1070, per_token(100, 50, 10, fixed=400))
    assert row.shape == Shape("nested", 4, 32)


def test_gives_up_microbatches_if_the_sum_of_gradients_does_not_fit(folder, monkeypatch):
    cost = per_token(100, 20, 10, gradients=1200)
    row, _ = searched(folder, monkeypatch, "full", 1500, cost)
    assert row.shape == Shape("nested", 1, 32)
    assert "--grad.microbatches 1 " in " ".join(row.flags)
    _, tried = searched(folder, monkeypatch, "lora", 10, cost)
    assert Shape("nested", 1, 32) not in tried  # gradients of adapters are small


def test_a_shorter_context_may_fit(folder, monkeypatch):
    row, _ = searched(folder, monkeypatch, "lora", 700, per_token(100, 50, 20, fixed=300))
    assert row.cost.peak > row.state_bytes + 700
    assert row.longest == 16  # 20 tokens
    row, _ = searched(folder, monkeypatch, "lora", 200, per_token(100, 50, 20, fixed=300))
    assert row.longest == 0


@pytest.mark.parametrize(
    ("given", "positions", "used"),
    [
        (None, 128, 128),
        (None, None, 2048),
        (None, 10**6, 2048),
        (128, 128, 128),
        (1, 128, 1),
        (10**6, None, 10**6),
    ],
)
def test_a_context_has_at_most_the_positions_of_the_model(given, positions, used):
    assert fit.context_of(given, types.SimpleNamespace(positions=positions)) == used


def test_no_context_is_longer_than_the_model_allows(folder, monkeypatch):
    row, tried = searched(folder, monkeypatch, "lora", 10**9, per_token(100, 50, 20))
    assert row.longest == LLAMA["max_position_embeddings"]
    assert len(tried) == 2  # all positions fit, so that no line is needed


def test_ways_that_only_save_memory_are_left_out_where_others_fit_without_remat(
    folder, capsys, monkeypatch
):
    def known(self, row, shape, batch_size):
        too_large = row.way == "full" and shape.policy == "none"
        return Cost(2**40 if too_large else row.state_bytes + 1, None)

    monkeypatch.setattr(fit.Planner, "cost", known)
    printed = output_of(capsys, "fit", "llama", "--budget", "1GB")
    assert [way for way in fit.WAYS if f"\n{way}:\n" in printed] == ["full", "compact", "lora"]
    assert "for longer contexts: --ways lora_int8 lora_nf4" in printed
    printed = output_of(capsys, "fit", "llama", "--budget", "1GB", "--ways", "lora", "lora_nf4")
    assert "\nlora_nf4:\n" in printed


def test_the_table_grows(folder, monkeypatch):
    monkeypatch.setattr(fit.Planner, "cost", lambda self, row, *_: Cost(row.state_bytes, None))
    search = planner_of(fit.read_model(folder / "llama"), 2**30).search(["lora", "full"], 32, 4)
    known = [[(r.shape is not None, r.longest) for r in rows.values()] for rows in search]
    no, fits, all_known = (False, None), (True, None), (True, 128)
    assert known[:3] == [[no, no], [fits, no], [fits, fits]]
    assert known[3:] == [[all_known, fits], [all_known, all_known]]


def test_a_gpu_offloads_where_a_cpu_cannot(folder):
    planner = planner_of(fit.read_model(folder / "llama"), 0)
    assert planner.policies == ["none", "segments", "nested"]
    gpu = Target("gpu", types.SimpleNamespace(platform="gpu"), 0, {})
    assert dataclasses.replace(planner, target=gpu).policies[-1] == "offload"


def test_nested_remat_holds_the_inputs_of_few_blocks():
    # Groups of six: the inputs of six groups, and of five more blocks in one of them.
    assert [fit.held_inputs(n) for n in (1, 2, 9, 32)] == [1, 2, 5, 11]


def test_state_bytes_of_a_known_model_are_as_by_hand(tmp_path):
    """Of a block: attention 2 h^2 + 2 h k, k of keys and values; feed-forward 3 h f; two norms."""
    c, blocks = QWEN_2_5_0_5B, 2
    h, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    k = h // c["num_attention_heads"] * c["num_key_value_heads"]
    matrices = 2 * h * h + 2 * h * k + 3 * h * f
    of_block = matrices + 2 * h + h + 2 * k  # with norms and biases; the head is tied
    assert 24 * of_block + v * h + h == 494_032_768  # as published
    total, matrices = blocks * of_block + v * h + h, blocks * matrices
    adapters = 16 * blocks * (4 * h + 2 * (h + k) + 3 * (h + f))
    path = headers_of(tmp_path / "model", c | {"num_hidden_layers": blocks})
    assert sum(f.stat().st_blocks * 512 for f in path.iterdir()) < 2**20
    planner = planner_of(fit.read_model(path), 0)
    rows = {way: planner.state(way, 32, 1) for way in fit.WAYS}
    assert rows["full"].trained == rows["compact"].trained == total
    small = 100  # step, key, counts
    assert rows["full"].state_bytes == pytest.approx(12 * total, abs=small)
    # 2 bytes, a correction, two moments, and two scales of 2 bytes per 32 elements.
    assert rows["compact"].state_bytes == pytest.approx(5.125 * total, rel=1e-3)
    for way in ("lora", "lora_int8", "lora_nf4"):
        assert rows[way].trained == adapters
        assert rows[way].trained_bytes == pytest.approx(12 * adapters, abs=small)
    frozen = {way: row.state_bytes - 12 * adapters for way, row in rows.items()}
    assert frozen["lora"] == pytest.approx(2 * total, abs=small)
    assert frozen["lora_int8"] == pytest.approx(2 * total - matrices, rel=2e-3)
    # Half a byte, and a scale of 2 bytes per 64 elements.
    scales = matrices / 32
    assert frozen["lora_nf4"] == pytest.approx(2 * total - 1.5 * matrices + scales, rel=1e-4)


# Fewer blocks.

SLIDING, FULL = ["sliding_attention"], "full_attention"


@pytest.mark.parametrize(
    ("config", "period"),
    [
        ({"model_type": "mistral"}, 1),
        ({"model_type": "gemma2"}, 2),
        ({"model_type": "gemma3_text"}, 6),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 3}, 3),
        ({"model_type": "smollm3"}, 4),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 9}, 12),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 12}, 1),
        ({"model_type": "gemma3_text", "layer_types": [*SLIDING * 2, FULL] * 4}, 3),
        (
            {"model_type": "smollm3", "use_sliding_window": True}
            | {"layer_types": [*SLIDING, FULL] * 6, "no_rope_layers": [1, 1, 0] * 4},
            6,
        ),
        ({"model_type": "gemma2", "layer_types": [*SLIDING * 11, FULL]}, 12),
    ],
)
def test_blocks_repeat_with_the_pattern_of_their_attention(config, period):
    config = {n: v for n, v in LLAMA.items() if n != "architectures"} | config
    network = build_model(config | {"head_dim": 8, "num_hidden_layers": 12})
    assert fit.period_of(network.kinds) == period


def test_a_shallow_copy_is_a_model_of_its_first_blocks(folder):
    config = {k: v for k, v in DEEP.items() if k != "architectures"}
    write_folder(folder / "gemma", config | {"model_type": "gemma2", "head_dim": 8})
    model = fit.read_model(folder / "gemma")
    assert (model.blocks, model.period, model.positions) == (4, 2, 128)
    assert model.depths(exact=False) == (4,)
    fit.write_shallow(model, 2, folder / "two")
    two = read_folder(folder / "two")
    _, shapes = published.match(two, "float32")
    assert sorted(shapes["blocks"]) == ["0", "1"]
    whole = published.match(model.folder, "float32")[1]
    assert shapes["blocks"]["1"] == whole["blocks"]["1"]
    assert shapes["embedding"] == whole["embedding"]


def test_zeros_replace_the_data_of_a_chat_file(folder):
    _, config = arguments.read_with_config(
        TrainArguments,
        recipes.load("finetune_lora"),
        ("--model.path", "llama", "--data.vocabulary", "256", "--data.no-packing"),
        "train",
    )
    shapes = setup(config, without_data=True).batch_shapes
    assert shapes["tokens"].shape == (8, 2049)
    assert {"length", "loss_mask", "weight"} <= shapes.keys()


MISTAKES = [
    (("fit",), "missing MODEL; usage: fnet fit MODEL"),
    (("fit", "nothing", "--budget", "1GB"), "nothing is not a folder; give a published model's folder"),
    (("fit", "llama"), "fnet fit: needs --budget, such as --budget 24GB, or --target"),
    (("fit", "llama", "--budget", "many"), "--budget: expected a number with a unit"),
    (("fit", "llama", "--budget", "1GB", "--context", 129), "--context: 129, but the model has 128 positions"),
    (("fit", "llama", "--budget", "1GB", "--context", 1), "--context: expected greater than or equal to 2, got 1"),
    (("fit", "llama", "--budget", "1GB", "--ways", "dora"), "--ways: expected one of full, compact"),
    (("fit", "llama", "--budget", "1GB", "--batch-size", 0), "--batch-size: expected greater than or equal to 1, got 0"),
    (("fit", "llama", "--target", "h900"), "--target: expected one of ["),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[m[:30] for _, m in MISTAKES])
def test_a_mistake_is_one_line(folder, capsys, words, message):
    assert exit_code(*words) == 2
    assert_one_line_error(capsys, message)


def test_a_config_without_blocks_is_one_line(folder, capsys):
    config = {k: v for k, v in DEEP.items() if k != "num_hidden_layers"}
    (folder / "llama" / "config.json").write_text(json.dumps(config))
    assert exit_code("fit", "llama", "--budget", "1GB") == 2
    assert_one_line_error(capsys, "model.path: llama: llama: config.json has no num_hidden_layers")


def test_an_image_network_is_one_line(folder, capsys):
    config = {
        **{"model_type": "vit", "architectures": ["ViTModel"], "hidden_size": 8},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
        **{"image_size": 8, "patch_size": 4, "num_channels": 3},
    }
    headers_of(folder / "vit", config)
    assert exit_code("fit", "vit", "--budget", "1GB") == 2
    assert_one_line_error(
        capsys,
        "model.path: vit is not a language model; for images, give fnet memory vit_finetune "
        "--model.path vit --data.path IMAGES --budget MEMORY",
    )


def test_every_way_is_a_command(folder):
    assert tuple(fit.WAYS) == get_args(arguments.Way)
    planner = planner_of(fit.read_model(folder / "llama"), 0)
    for way in fit.WAYS:
        config = fit.config_of(way, planner.flags(way, folder / "llama", Shape("none", 2, 16), 4))
        assert config.data.vocabulary == 256
        assert (config.model.lora_rank is None) == (way in ("full", "compact"))
        assert (config.model.quantize or "") == way.partition("_")[2]
        dtype = "bfloat16" if way == "compact" else "float32"
        assert (config.optim.name, config.train.params_dtype) == (
            "compact_adamw" if way == "compact" else "adamw",
            dtype,
        )
