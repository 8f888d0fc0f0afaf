"""Published language models in the program: import, train, sample and export."""

import dataclasses
import io
import json
import sys

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from pretrained_folder import LLAMA, VIT, write_folder, write_tokenizer
from program_cases import assert_one_line_error, exit_code, fnet_command, initial_run, output_of
from safetensors.numpy import load_file

import fnet
from train.config import ChatFile, Config, Optim, Pretrained, Synthetic, Train
from train.data.model_folder import read_folder
from train.errors import UserError
from train.run.checkpoints import Checkpoints, load_network, without_frozen
from train.run.run_folder import RunFolder
from train.run.setup import setup

RECIPE = """
from train.config import ChatFile, Checkpoint, Config, Optim, Pretrained, Train

def config():
    return Config(
        name="tiny",
        data=ChatFile(path="sums.jsonl", vocabulary=256, context=12, batch_size=8),
        model=Pretrained(path="llama"),
        optim=Optim(name="adamw", learning_rate=0.01, schedule="constant"),
        train=Train(steps=4, log_every=2, eval_every=2),
        checkpoint=Checkpoint(every=2, best=False),
    )
"""
LORA = "--model.lora-rank", "2"


@pytest.fixture
def folder(workplace):
    """A model in bfloat16, data, and a recipe."""
    write_folder(workplace / "llama", dtype=ml_dtypes.bfloat16, shards=2)
    (workplace / "tiny.py").write_text(RECIPE)
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (workplace / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    return workplace


def config_of(folder, **model):
    data = ChatFile(path=str(folder / "sums.jsonl"), vocabulary=256, context=12, batch_size=8)
    section = Pretrained(path=str(folder / "llama"), **model)
    return Config(data=data, model=section, optim=Optim(name="adamw"), train=Train(steps=2))


def published(folder):
    source = read_folder(folder / "llama")
    return fnet.interop.from_huggingface(source.config, source.tensors, dtype=jnp.float32)


def test_starts_from_the_published_parameters(folder):
    run = setup(config_of(folder))
    _, expected = published(folder)
    chex.assert_trees_all_equal(run.compile_init()(jax.random.key(0)).params, expected)
    assert {a.dtype for a in jax.tree.leaves(run.state_shapes.params)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_adapters_start_at_the_published_model(folder):
    run = setup(config_of(folder, lora_rank=2))
    state = run.compile_init()(jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.eval_shape(lambda s: s, state), run.state_shapes
    )
    assert {path.rpartition("/")[2] for path in state.params} == {"kernel"}
    model, expected = published(folder)
    tokens = np.frombuffer(b"2+2=4 and so on", np.uint8)[None].astype(np.int32)
    logits, _ = run.task.model.apply(state.params, state.model_state, tokens, train=False)
    reference, _ = model.apply(expected, {}, tokens, train=False)
    frozen = state.model_state["frozen"]
    assert {a.dtype for a in jax.tree.leaves(frozen)} == {jnp.dtype("bfloat16")}
    chex.assert_trees_all_close(logits, reference, atol=1e-5)


def moved(params):
    return jax.tree.map(lambda p: p + 0.05 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), params)


@pytest.mark.slow
def test_quantized_parameters_are_read_again_and_not_saved(folder):
    run = setup(config_of(folder, lora_rank=2, quantize="int8"))
    state = run.compile_init()(jax.random.key(0))
    state = state.replace(params=moved(state.params))
    with Checkpoints(folder / "c", 1) as checkpoints:
        checkpoints.save(2, without_frozen(state), {})
        checkpoints.wait()
        assert "frozen" not in checkpoints.restore_network().model_state
        restored = checkpoints.restore(run.state_shapes, run.task.model).state
    chex.assert_trees_all_equal(*(s.replace(key=None) for s in (restored, state)))
    errors = run.task.model.errors().values()
    assert errors
    assert all(0 < error < 0.02 for error in errors)


@pytest.mark.slow
def test_an_imported_model_is_a_run(folder, capsys):
    data = "--data.vocabulary", 256, "--data.path", "sums.jsonl", "--data.context", 12
    out = output_of(capsys, "import", "llama", "--out", "run", *data)
    assert "34,976" in out
    assert "bfloat16" in out
    assert (
        "Train all parameters with fnet train run --data.path sums.jsonl --resume, or adapters"
        in out
    )
    assert sorted(p.name for p in (folder / "run").iterdir()) == ["config.json", "model"]

    words = "--prompt", "2+2=", "--length", 6, "--temperature", 0
    text = output_of(capsys, "sample", "run", *words)
    model, params = published(folder)
    prompt = np.frombuffer(b"2+2=", np.uint8)[None].astype(np.int32)
    model = fnet.interop.huggingface.build_model(LLAMA, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    tokens = fnet.generate(model, params, {}, prompt, jax.random.key(0), 6, temperature=0.0)
    assert text == "2+2=" + bytes(tokens[0].tolist()).decode("utf-8", "replace") + "\n"


def test_a_published_folder_is_sampled_as_it_is(folder, capsys, monkeypatch):
    write_tokenizer(folder / "llama" / "tokenizer.json")
    (folder / "llama" / "generation_config.json").write_text('{"num_beams": 4}')
    files = sorted(folder.rglob("*"))
    monkeypatch.setattr(fnet, "stream", lambda *_, **__: iter(()))
    fnet_command("sample", "llama", "--prompt", "2+2=")
    printed = capsys.readouterr()
    assert printed.err == "note: generation_config.json: num_beams 4 is not applied\n"
    assert printed.out == "2+2=\n"
    assert sorted(folder.rglob("*")) == files
    assert exit_code("eval", "llama") == 2
    message = "llama is a published model; make a run of it with fnet import llama --out runs/base"
    assert_one_line_error(capsys, message)


def test_export_writes_the_published_tensors(folder, capsys):
    fnet_command("import", "llama", "--out", "run", "--data.vocabulary", 256)
    fnet_command("export", "run")
    tensors = load_file(folder / "run" / "exported" / "model.safetensors")
    expected = {}
    for path in sorted((folder / "llama").glob("*.safetensors")):
        expected |= load_file(path)
    chex.assert_trees_all_equal(tensors, expected)
    assert json.loads((folder / "run" / "exported" / "config.json").read_text()) == LLAMA
    modes = {path.stat().st_mode for path in (folder / "run" / "exported").iterdir()}
    assert modes == {(folder / "sums.jsonl").stat().st_mode}  # others may read them
    assert exit_code("export", "run") == 2
    assert_one_line_error(capsys, "run/exported is not an empty folder; give a new one")


@pytest.mark.slow
def test_exported_adapters_are_merged(folder):
    run = initial_run(folder / "run", config_of(folder, lora_rank=2), moved)
    network = setup(run.read_config()).task.model
    trained = load_network(run, network)
    fnet_command("export", "run", "--out", "merged")
    tokens = np.frombuffer(b"2+2=4", np.uint8)[None].astype(np.int32)
    logits, _ = network.apply(trained.evaluation_params, trained.model_state, tokens, train=False)
    merged = load_file(folder / "merged" / "model.safetensors")
    model, params = fnet.interop.from_huggingface(LLAMA, merged, dtype=jnp.float32)
    expected, _ = model.apply(params, {}, tokens, train=False)
    assert jnp.abs(logits - expected).max() < 0.02 * jnp.abs(expected).max()  # bfloat16

    fnet_command("export", "run", "--out", "adapters", "--adapters")
    tensors = load_file(folder / "adapters" / "adapter_model.safetensors")
    peft_config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert peft_config["task_type"] == "CAUSAL_LM"
    lora_config, adapters = fnet.interop.from_peft(
        peft_config, tensors, fnet.interop.peft.huggingface_modules(model)
    )
    assert (lora_config.rank, lora_config.scale) == (2, 1.0)
    chex.assert_trees_all_equal(adapters, trained.evaluation_params)


def image_config(folder, num_classes):
    write_folder(folder / "vit", VIT)
    section = Pretrained(path=str(folder / "vit"))
    data = Synthetic(classes=num_classes, image_size=16, batch_size=4, examples=8)
    return Config(data=data, model=section, train=Train(steps=1))


def test_images_are_classified_by_the_published_model(folder):
    run = setup(image_config(folder, 7))
    state = run.compile_init()(jax.random.key(0))
    source = read_folder(folder / "vit")
    model, params = fnet.interop.from_huggingface(source.config, source.tensors)
    image = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    logits, _ = run.task.model.apply(state.params, {}, image, train=False)
    chex.assert_trees_all_equal(state.params, params)
    expected, _ = model.apply(params, {}, image, train=False)
    chex.assert_trees_all_close(logits, expected, atol=1e-6)


def test_positions_are_interpolated_for_images_of_another_size(folder):
    config = image_config(folder, 7)
    run = setup(dataclasses.replace(config, data=dataclasses.replace(config.data, image_size=24)))
    state = run.compile_init()(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), (1, 24, 24, 3))
    logits, _ = run.task.model.apply(state.params, {}, image, train=False)
    source = read_folder(folder / "vit")
    model, params = fnet.interop.from_huggingface(
        source.config, source.tensors, interpolate_positions=True
    )
    expected, _ = model.apply(params, {}, image, train=False)
    chex.assert_trees_all_close(logits, expected, atol=1e-6)


def test_rejects_models_of_other_data(folder, capsys):
    config = image_config(folder, 3)
    text = dataclasses.replace(config_of(folder), model=config.model)
    with pytest.raises(UserError, match="vit is not a language model"):
        setup(text)
    with pytest.raises(UserError, match="is a language model, but the data are images"):
        setup(dataclasses.replace(config, model=config_of(folder).model))
    adapters = dataclasses.replace(config.model, lora_rank=2)
    with pytest.raises(UserError, match=r"model.lora_rank: adapters are for language models"):
        setup(dataclasses.replace(config, model=adapters))


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "run", "--prompt", "2"),
        ("eval", "run"),
        ("export", "run"),
        ("export", "run", "--format", "stablehlo"),
        ("predict", "run", "x.png"),
        ("train", "run", "--resume"),
    ],
)
def test_a_moved_model_is_one_line(folder, capsys, words):
    RunFolder(folder / "run").create()
    RunFolder(folder / "run").write_config(config_of(folder))
    (folder / "llama").rename(folder / "moved")
    assert exit_code(*words) == 2
    assert_one_line_error(
        capsys,
        f"model.path: {folder / 'llama'} is not a folder; if the model was moved, change "
        "model.path in run/config.json",
    )


def tokenizer_folder(path):
    """Give a model a tokenizer of words, a chat template and generation settings."""
    words = ["<unk>", "<end>", "<user>", "<bot>", "hello", "you", "there"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>", "<user>", "<bot>"])
    tokenizer.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else 'user' }}> "
        "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    config = {"chat_template": template, "eos_token": "<end>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"eos_token_id": [1]}')


class Scripted:
    """A decoder that says "there you <end> you" whatever it is asked."""

    def init_cache(self, batch, length, dtype=jnp.float32):
        return jnp.zeros((batch,), jnp.int32)

    def extend(self, params, state, cache, tokens, position):
        answer = jnp.array([6, 5, 1, 5])
        said = jnp.where(tokens[:, -1] == 3, 0, cache)
        return jax.nn.one_hot(answer[said % 4], 7) * 9, said + 1


def test_chat_answers_until_the_end_token(folder, capsys, monkeypatch):
    tokenizer_folder(folder / "llama")
    fnet_command("import", "llama", "--out", "run")
    from train.run import generation as sample

    def build(config, original=sample.language.build_network):
        network = original(config)
        decode = fnet.layer.Decode(Scripted().init_cache, Scripted().extend)
        return network._replace(base=network.base._replace(decode=decode))

    monkeypatch.setattr(sample.language, "build_network", build)
    capsys.readouterr()
    fnet_command("sample", "run", "--chat", "--prompt", "hello")
    assert capsys.readouterr().out.split() == ["there", "you"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nyou\n"))
    assert output_of(capsys, "sample", "run", "--chat").split() == ["there", "you"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"hidden_size": 16}, "expected shape"),
        ({"num_hidden_layers": 1}, "the checkpoint has tensors that the model does not"),
        ({"num_hidden_layers": 3}, "the checkpoint lacks model.layers.2"),
        ({"num_hidden_layers": 100}, "num_hidden_layers: 100, but the checkpoint has 21 tensors"),
    ],
)
def test_rejects_models_that_do_not_fit(folder, capsys, change, message):
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA | change))
    assert exit_code("import", "llama", "--out", "run") == 2
    assert_one_line_error(capsys, message)
    assert not (folder / "run").exists()


def test_adapters_that_peft_has_no_module_for_are_reported_before_training(folder):
    before = setup(config_of(folder, lora_rank=2)).notes
    targets = "blocks/*/kernel", "embedding/*"
    *same, note = setup(config_of(folder, lora_rank=2, lora_targets=targets)).notes
    assert (*same,) == before
    assert "PEFT has no module for embedding/embedding, so that fnet export writes merged" in note


def test_rejects_options_of_adapters_without_adapters(folder, capsys):
    assert exit_code("train", "tiny.py", "--model.quantize", "int8") == 2
    assert_one_line_error(capsys, "model.quantize: needs model.lora_rank")
    assert exit_code("train", "tiny.py", *LORA, "--model.lora-targets", "none*") == 2
    assert_one_line_error(capsys, "no parameter matches")


def test_a_run_adds_the_balance_loss_of_experts(folder):
    """It counts in training, by the number of learned tokens, and not in evaluation."""
    mixtral = LLAMA | {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 3,
    }  # fmt: skip
    write_folder(folder / "llama", mixtral)
    (folder / "llama" / "model.safetensors.index.json").unlink()
    config = config_of(folder)
    optim = dataclasses.replace(config.optim, expert_balance=0.5)
    plain, balanced = setup(config), setup(dataclasses.replace(config, optim=optim))
    state = plain.compile_init()(jax.random.key(0))
    batch = next(plain.training_batches(0))
    arguments = state.params, state.model_state, batch, jax.random.key(0)
    more, less = (jax.jit(run.task.loss)(*arguments)[0] for run in (balanced, plain))
    added = more - less
    assert 0.9 < added.min() < added.max() < 2  # half of a bit more than the 2 chosen
    measured = [
        jax.jit(run.task.measure)(*arguments[:3]).metrics["loss"] for run in (plain, balanced)
    ]
    chex.assert_trees_all_equal(*measured)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny.py", "--optim.focal", "2"), "optim.focal: 2, but the loss of text has none; leave it out"),
        (("tiny.py", "--optim.expert-balance", "0.1"), "expected the routing of layers of experts, got none"),
        (("digits", "--optim.expert-balance", "0.1"), "optim.expert_balance: 0.1, but the loss of images has none"),
    ],
)  # fmt: skip
def test_terms_that_a_loss_has_not_are_refused(folder, capsys, words, message):
    assert exit_code("train", *words) == 2
    assert_one_line_error(capsys, message)


def test_adapters_are_not_used_with_other_weights(folder, capsys):
    initial_run(folder / "run", config_of(folder, lora_rank=2))
    path = max((folder / "llama").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert exit_code("sample", "run") == 2
    assert "model.path: has other weights than those" in capsys.readouterr().err
    assert not list((folder / "run").glob("damaged*"))
