"""Published image networks in the program: image size, new classes, export."""

import json

import chex
import jax
import numpy as np
import pytest
from pretrained_folder import VIT, write_folder
from pretrained_image_cases import CONFIGS
from program_cases import assert_one_line_error, exit_code, fnet_command

import fnet
from fnet.interop.huggingface.images import preprocessing
from tests.interop.test_pretrained_images import tensors_of
from train.arguments import ExportArguments
from train.config import Config, ImageFolder, Pretrained, Synthetic, Train
from train.data import Outputs
from train.data.chat import load_json
from train.data.model_folder import read_folder
from train.errors import UserError
from train.networks.model_images import image_data
from train.networks.published import network as published
from train.run.checkpoints import load_network
from train.run.model_files import export_model
from train.run.open_run import OpenRun, write_classes
from train.run.run_folder import RunFolder
from train.tasks import images

FLOWERS = ("daisy", "rose", "tulip")


def make_run(workplace, name, data, tensors=None):
    config = VIT if name == "small" else CONFIGS[name]
    write_folder(workplace / "model", config, tensors=tensors)
    run = Config(data=data, model=Pretrained(path="model"), train=Train(precision="bfloat16"))
    folder = RunFolder(workplace / "run")
    folder.create()
    folder.write_config(run)
    return folder, run


def folder_data(size, **options):
    return ImageFolder(image_size=size, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), **options)


def logits_of_run(folder, config, x):
    shape = x.shape[1:]
    network = config.model.for_images(shape, FLOWERS, "float32")
    trained = load_network(folder, network)
    return network.apply(trained.evaluation_params, {}, x, train=False)[0]


@pytest.mark.parametrize("name", ["vit", "timm_vit"])
def test_an_exported_folder_has_the_new_classes_and_the_size_of_the_run(workplace, name):
    folder, run = make_run(workplace, name, folder_data(24, resize=32), tensors_of(name))
    write_classes(folder, Outputs(FLOWERS))
    source = read_folder(export_model(OpenRun(folder, run), ExportArguments()))
    model, params = fnet.interop.from_huggingface(source.config, source.tensors)
    x = jax.random.normal(jax.random.key(1), (2, 24, 24, 3))
    actual, _ = model.apply(params, {}, x, train=False)
    chex.assert_trees_all_close(actual, logits_of_run(folder, run, x), atol=2e-5)
    if name.startswith("timm"):
        assert source.config["label_names"] == list(FLOWERS)
        stored = source.config
    else:
        assert source.config["id2label"] == {"0": "daisy", "1": "rose", "2": "tulip"}
        assert source.config["architectures"][0].endswith("ForImageClassification")
        stored = load_json(source.path / "preprocessor_config.json")
    assert preprocessing(stored).interpolation == "bilinear"
    expected = {"image_size": 24, "resize": 32, "mean": run.data.mean, "std": run.data.std}
    data = image_data(source.path, source.config)
    assert {name: getattr(data, name) for name in expected} == expected


@pytest.mark.slow
def test_an_exported_folder_keeps_the_classifier_and_the_dtypes_of_the_model(workplace):
    folder, run = make_run(workplace, "small", folder_data(16))
    tensors = write_folder(workplace / "model", VIT, dtype=np.float16)
    write_classes(folder, Outputs(tuple("abcdefg")))
    source = read_folder(export_model(OpenRun(folder, run), ExportArguments()))
    assert source.config["id2label"]["6"] == "g"
    exported = {name: np.asarray(t[...]) for name, t in source.tensors.items()}
    chex.assert_trees_all_equal(exported, tensors)


def test_export_reports_models_that_have_no_published_classifier(workplace, capsys):
    name = "clip_no_projection"
    folder, _ = make_run(workplace, name, folder_data(16), tensors_of(name))
    write_classes(folder, Outputs(FLOWERS))
    assert exit_code("export", "run") == 2
    assert_one_line_error(
        capsys, "clip_vision_model with a classifier of your classes has no published layout"
    )


def test_a_checkpoint_of_both_towers_of_clip_gets_a_new_classifier(workplace):
    folder, run = make_run(workplace, "clip", folder_data(16), tensors_of("clip"))
    x = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    assert logits_of_run(folder, run, x).shape == (2, 3)


@pytest.mark.slow
def test_an_exported_program_of_a_bfloat16_run_is_float32(workplace):
    data = Synthetic(classes=3, image_size=16, batch_size=4, examples=8)
    folder, run = make_run(workplace, "small", data)
    fnet_command("export", "run", "--format", "stablehlo")
    program = jax.export.deserialize(bytearray((folder.path / "model.stablehlo").read_bytes()))
    x = np.random.default_rng(0).random((2, 16, 16, 3), np.float32)
    expected = logits_of_run(folder, run, images.normalize(images.in_float32(run), x))
    chex.assert_trees_all_close(program.call(x), expected, rtol=1e-4, atol=1e-5)


def test_images_that_are_prepared_otherwise_than_the_models_are_noted(workplace):
    _, run = make_run(workplace, "small", folder_data(24))
    assert run.model.notes(run.data, ()) == [
        "data.image_size: 24, but model was trained with 16; give --data.image-size 16 to train as "
        "it was"
    ]
    own = {"size": {"height": 24, "width": 24}, "image_mean": [0.1, 0.2, 0.3]}
    file = workplace / "model" / "preprocessor_config.json"
    file.write_text(json.dumps(own | {"image_std": run.data.std}))
    (note,) = run.model.notes(run.data, ())
    assert note.endswith("with (0.1, 0.2, 0.3); give --data.mean 0.1 0.2 0.3 to train as it was")
    own = {"size": {"height": 24, "width": 24}, "image_mean": run.data.mean}
    file.write_text(json.dumps(own | {"image_std": run.data.std}))
    assert run.model.notes(run.data, ()) == []
    (workplace / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        run.model.notes(run.data, ())


def test_memory_prints_the_note_on_the_image_size(workplace, capsys):
    make_run(workplace, "small", folder_data(24, batch_size=2, path="none"))
    fnet_command("memory", "run")
    assert "data.image_size: 24, but model was trained with 16;" in capsys.readouterr().out


def test_a_config_of_timm_without_classes_has_no_arguments_left_for_them():
    config = {"architecture": "vit", "num_classes": 5, "model_args": {"num_classes": 5}}
    assert published.without_classes(config) == {"architecture": "vit", "num_classes": 0}
    config["model_args"]["img_size"] = 32
    assert published.without_classes(config)["model_args"] == {"img_size": 32}


def test_outputs_of_a_published_classifier_get_the_classes_that_it_names(workplace):
    names = {"0": "tulip", "1": "daisy", "2": "rose"}
    write_folder(workplace / "model", VIT | {"id2label": names})
    section = Pretrained(path="model")
    image = np.random.default_rng(0).random((2, 16, 16, 3), np.float32)

    def logits(section, classes):
        network = section.for_images((16, 16, 3), classes, "float32")
        params, state = jax.eval_shape(network.init, jax.random.key(0))
        assert network.new == ""
        return network.apply(network.read(params), state, image, train=False)[0]

    published = logits(section, ("tulip", "daisy", "rose"))
    chex.assert_trees_all_close(logits(section, FLOWERS), published[:, [1, 2, 0]], rtol=1e-5)
    assert section.notes(folder_data(16), FLOWERS) == []


def test_classes_that_are_numbers_are_outputs_by_number(workplace):
    kind = VIT | {"id2label": {str(i): f"LABEL_{i}" for i in range(11)}}
    classes = sorted(map(str, range(11)))
    write_folder(workplace / "model", kind)
    image = np.random.default_rng(0).random((2, 16, 16, 3), np.float32)

    def logits(classes):
        network = Pretrained(path="model").for_images((16, 16, 3), classes, "float32")
        params, state = jax.eval_shape(network.init, jax.random.key(0))
        return network.apply(network.read(params), state, image, train=False)[0]

    published = logits([str(i) for i in range(11)])
    by_number = published[:, [int(name) for name in classes]]
    chex.assert_trees_all_close(logits(classes), by_number, rtol=1e-5)
    named = kind | {"id2label": {str(i): f"tench {i}" for i in range(11)}}
    (workplace / "model" / "config.json").write_text(json.dumps(named))
    chex.assert_trees_all_close(logits(classes), by_number, rtol=1e-5)
    (note,) = Pretrained(path="model").notes(folder_data(16), classes)
    assert "output 0 is taken for 0, 1 for 1, and so on" in note


def test_a_published_classifier_of_other_classes_is_refused_until_the_user_decides(workplace):
    write_folder(workplace / "model", VIT | {"id2label": {"0": "cat", "1": "dog", "2": "cow"}})
    section = Pretrained(path="model")
    with pytest.raises(UserError, match=r"model has a classifier of cat, dog, cow, not of daisy, "):
        section.for_images((16, 16, 3), FLOWERS, "float32")
    for classifier, new in (("keep", ""), ("new", "classifier")):
        section = Pretrained(path="model", classifier=classifier)
        assert section.for_images((16, 16, 3), FLOWERS, "float32").new == new
    (note,) = Pretrained(path="model", classifier="keep").notes(folder_data(16), FLOWERS)
    assert "output 0 is taken for daisy, 1 for rose" in note


def test_a_published_classifier_of_more_classes_is_new_unless_it_is_to_be_kept(workplace):
    write_folder(workplace / "model", VIT | {"id2label": {str(i): f"tench {i}" for i in range(5)}})
    assert Pretrained(path="model").for_images((16, 16, 3), FLOWERS, "float32").new == "classifier"
    (note,) = Pretrained(path="model").notes(folder_data(16), FLOWERS)
    assert note == "model.classifier: new, because model has one of 5 classes, not of 3"
    message = (
        "model.classifier: keep, but model has a classifier of 5 classes, and the data have 3; "
    )
    with pytest.raises(UserError, match=message):
        Pretrained(path="model", classifier="keep").for_images((16, 16, 3), FLOWERS, "float32")


def test_a_published_classifier_without_names_is_kept_with_a_note(workplace):
    write_folder(workplace / "model", VIT | {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}})
    section = Pretrained(path="model")
    assert section.for_images((16, 16, 3), FLOWERS, "float32").new == ""
    (note,) = section.notes(folder_data(16), FLOWERS)
    assert "whose outputs are not named as your classes are" in note
