"""Published models: the config that fine-tunes one, and the files that are read for a network."""

import contextlib
import json
import re

import numpy as np
import pytest
from pretrained_folder import LLAMA, VIT, write_folder
from safetensors.numpy import save_file

from train.config import ChatFile, Config, ImageFolder, Pretrained
from train.data.chat_end import AnswerEnd
from train.errors import UserError
from train.run import model_files
from train.run.open_run import begin, published_config
from train.run.run_folder import RunFolder
from train.run.weight_files import check_importable, read


@pytest.mark.parametrize(
    ("folder", "name"),
    [("Llama 3.2-1B", "Llama-3.2-1B"), ("_.-tiny_x", "tiny_x"), ("---", "model")],
)
def test_a_model_is_fine_tuned_as_a_whole_under_the_name_of_its_folder(tmp_path, folder, name):
    write_folder(tmp_path / folder, LLAMA)
    config = published_config(str(tmp_path / folder))
    assert config.name == name
    assert config.model.path == str((tmp_path / folder).resolve())
    assert isinstance(config.data, ChatFile)
    assert (config.model.lora_rank, config.train.epochs, config.train.precision) == (
        None,
        1,
        "bfloat16",
    )
    optim = config.optim
    assert (optim.name, optim.learning_rate, optim.warmup_steps) == ("adamw", 1e-5, 100)


def test_images_are_prepared_as_the_model_was_trained(tmp_path):
    write_folder(tmp_path / "vit", VIT)
    prepared = {"size": 16, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(prepared))
    data = published_config(str(tmp_path / "vit")).data
    assert isinstance(data, ImageFolder)
    assert (data.image_size, data.mean, data.std) == (16, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def write_timm(folder, name, tensors=None, **more):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architecture": name} | more))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "has_file", "message"),
    [
        (
            "vit_base_patch16_224",
            True,
            "is timm's vit_base_patch16_224: train it with --model.name",
        ),
        ("deit_tiny", True, "is timm's deit_tiny: train it with --model.name pretrained"),
        ("convnext_tiny", True, "is timm's convnext_tiny: train it with --model.name pretrained"),
        ("resnet99", True, "is timm's resnet99, which is not supported"),
        ("resnet18", False, "is a published resnet18: train it with --model.name pretrained"),
    ],
)
def test_weights_of_another_kind_name_what_trains_them(tmp_path, name, has_file, message):
    write_timm(tmp_path / "m", name, {"a": np.zeros(1)} if has_file else None)
    with pytest.raises(UserError, match=message):
        read(str(tmp_path / "m"))


def test_weights_of_timm_come_with_the_options_of_their_variant_and_their_classes(tmp_path):
    tensors = {"a": np.arange(3.0)}
    write_timm(tmp_path / "m", "tf_efficientnet_b0", tensors, label_names=["x", "y"])
    weights = read(str(tmp_path / "m"))
    np.testing.assert_array_equal(weights.state_dict["a"][...], tensors["a"])
    expected = {"eps": "0.001", "padding": "same", "variant": "tf_efficientnet_b0"}
    assert expected.items() <= weights.metadata.items()
    assert json.loads(weights.metadata["classes"]) == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "needs_a_config"),
    [("resnet18", True), ("vit_tiny", False), ("convnext_tiny", False), ("unknown", False)],
)
def test_a_network_that_a_config_describes_is_imported_with_it(tmp_path, name, needs_a_config):
    write_timm(tmp_path / "m", name)
    refused = pytest.raises(UserError, match=f"is timm's {name}: give a config of its network")
    with refused if needs_a_config else contextlib.nullcontext():
        check_importable(tmp_path / "m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "cannot read {}: Is a directory"),
        ("none#ema", "cannot read {}none: No such file or directory; fnet downloads no weights"),
        ("empty", "{}empty is empty"),
        ("text", "{}text is not a checkpoint: it begins with b'some tex', unlike files of torch"),
    ],
)
def test_what_holds_no_weights_is_named(tmp_path, given, message):
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("some text")
    where = f"{tmp_path}/" if given else f"{tmp_path}"
    with pytest.raises(UserError, match=re.escape(message.format(where))):
        read(f"{tmp_path}/{given}" if given else str(tmp_path))


def test_a_run_keeps_the_tokenizer_and_the_chat_template_that_it_uses(tmp_path):
    model, own = tmp_path / "model", tmp_path / "own"
    published = [model / name for name in ("config.json", "special_tokens_map.json")]
    for path in (*published, model / "tokenizer.json", own / "tokenizer.json", own / "a.jinja"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.parent.name)
    data = ChatFile(tokenizer=str(own), chat_template=str(own / "a.jinja"))
    run = RunFolder(tmp_path / "run")
    begin(run, Config(data=data, model=Pretrained(path=str(model))))
    files = {path.name: path.read_text() for path in run.model.iterdir()}
    expected = {"tokenizer.json": "own", "chat_template.jinja": "own"}
    assert files == {"config.json": "model"} | expected


def test_an_end_of_answers_that_generation_does_not_name_is_found(tmp_path, monkeypatch):
    end = AnswerEnd(7, "<end>", is_next=False)
    monkeypatch.setattr(model_files, "find_end", lambda *_: end)
    monkeypatch.setattr(model_files.language, "chat_template", lambda *_: None)
    for named, expected in ((1, end), (7, None), ([1, 7], None)):
        settings = json.dumps({"eos_token_id": named})
        (tmp_path / "generation_config.json").write_text(settings)
        assert model_files._unnamed_end(tmp_path, ChatFile()) == expected
