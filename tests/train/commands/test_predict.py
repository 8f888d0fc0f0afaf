"""``fnet predict``: labels and masks of images, and mistakes."""

import dataclasses
import doctest
import io
import json
import os
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vision_cases
from image_cases import write_image
from PIL import ExifTags, Image
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of
from rich.console import Console

from train import data
from train import predictor as predictor_module
from train.arguments import PredictArguments
from train.commands.predict import predict, print_predictions
from train.config import Config, Digits, ImageFolder, SegmentationFolder, Synthetic
from train.config.recipes import load
from train.data import Outputs, evaluation_batches
from train.data.decode import UnreadableError, decode_mask
from train.data.label_map import LabelMap
from train.data.preprocessing import PreprocessedImage
from train.errors import UserError
from train.output.palette import palette
from train.predictor import Predictor, predict_mask
from train.run.checkpoints import Checkpoints
from train.run.open_run import OpenRun, write_classes
from train.run.predictions import describe_masks
from train.run.run_folder import RunFolder
from train.tasks import build

small_deeplab = pytest.fixture(vision_cases.small_deeplab)
recipes = pytest.fixture(vision_cases.recipes)
run_of = pytest.fixture(vision_cases.run_of)
begun = pytest.fixture(vision_cases.begun)
saved = pytest.fixture(vision_cases.saved)


def evaluated(run):
    """Test examples of a run, with the predictions of its checkpoint."""
    folder = RunFolder(run)
    config = folder.read_config()
    task = build(config)
    with Checkpoints(folder.checkpoints, 2) as checkpoints:
        params, state, _ = checkpoints.restore_network(task.model.init)
    batch = next(evaluation_batches(task.dataset, len(task.dataset.test["id"])))
    return batch, jax.jit(task.measure)(params, state, batch), (task, params, state)


def test_json_prints_only_json_and_writes_nothing(run_of, recipes, capsys):
    run = run_of("colours")
    before = {p: p.read_bytes() for p in recipes.rglob("*") if p.is_file()}
    result = json.loads(output_of(capsys, "predict", run, "colours/val/red/0.png", "--json"))
    (prediction,) = result["predictions"]
    assert prediction.keys() == {"image", "labels"}
    assert prediction["labels"][0]["label"] == "red"
    assert sum(label["probability"] for label in prediction["labels"]) == pytest.approx(1)
    assert before == {p: p.read_bytes() for p in recipes.rglob("*") if p.is_file()}


def test_prints_a_table_on_a_terminal(run_of):
    folder = RunFolder(run_of("colours"))
    options = PredictArguments(top_k=2, out="out")
    result = predict(folder, ["colours/val/red/0.png"], options)
    text = io.StringIO()
    print_predictions(result, Console(file=text, force_terminal=True, width=80))
    text = text.getvalue()
    assert "┃" in text
    assert text.count("%") == 2


RED, BLUE = (255, 0, 0), (0, 0, 255)
LABEL_MAPS = {
    "binary": LabelMap(("no", "yes"), ((0, 0), (255, 1))),
    "values of a table": LabelMap(("a", "b"), ((0, 255), (7, 1), (33, 0)), colors=(RED, BLUE)),
    "colors": LabelMap(
        ("a", "b"), ((0, 0), (1, 1)), ((0x0000FF, 1), (0xFF0000, 0)), "colors", (RED, BLUE)
    ),
    "16 bits": LabelMap(("a", "b"), ((7, 0), (1007, 1))),
    "one value beyond 8 bits": LabelMap(("a", "b"), ((7, 0), (256, 1))),
}


@pytest.mark.parametrize("name", LABEL_MAPS)
def test_predicted_masks_hold_the_values_of_the_users_masks(name, tmp_path):
    write_image(tmp_path / "x.png", 3, (4, 2))
    label_map, path = LABEL_MAPS[name], str(tmp_path / "x.png")
    labels = np.array([[0, 1, 1, 0], [1, 1, 0, 0]], np.uint8)
    outputs = Outputs(label_map.names, label_map)
    prediction, _ = describe_masks(outputs, tmp_path / "out", [path], 100, 2)(path, labels)
    mask = decode_mask(prediction["mask"])
    np.testing.assert_array_equal(label_map.labels(mask), labels)
    np.testing.assert_array_equal(mask.values, label_map.mask_values()[labels])


@pytest.mark.slow
def test_masks_have_the_size_of_the_image_and_are_accurate(run_of, recipes, capsys):
    run = run_of("halves")
    names = [f"{i:02}" for i in range(15)]
    given = [f"halves/images/{name}.png" for name in names]
    output = output_of(capsys, "predict", run, *given, "--out", "out")
    result = json.loads((recipes / "out" / "predictions.json").read_text())
    assert output.splitlines()[-2:] == ["masks: out/masks", "overlays: out/overlays"]
    right = []
    for name, p in zip(names, result["predictions"], strict=True):
        assert p["mask"] == f"out/masks/{name}.png"
        assert p["overlay"] == f"out/overlays/{name}.png"
        image = Image.open(recipes / p["image"])
        mask, overlay = (Image.open(recipes / p[kind]) for kind in ("mask", "overlay"))
        assert mask.size == overlay.size == image.size
        assert (mask.mode, overlay.mode) == ("P", "RGB")
        labels = np.asarray(mask)
        colours = np.asarray(mask.convert("RGB"))
        np.testing.assert_array_equal(colours, palette()[labels])
        truth = np.asarray(Image.open(recipes / "halves" / "masks" / f"{name}.png"))
        right.append((labels == truth)[truth < 255].mean())
        shares = {label["label"]: label["share"] for label in p["labels"]}
        assert shares == {
            c: (labels == i).mean()
            for i, c in enumerate(vision_cases.CLASSES)
            if (labels == i).any()
        }
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
        # The overlay blends the image with the color of the label.
        painted = np.asarray(overlay).astype(int)
        mixed = 0.4 * np.asarray(image) + 0.6 * colours
        assert np.abs(painted - mixed).max() <= 0.5
    assert np.mean(right) > 0.8
    assert f"{given[0]}  " in output


def test_masks_of_a_data_set_are_not_overwritten(run_of, capsys):
    run = run_of("halves")
    capsys.readouterr()
    assert exit_code("predict", run, "halves/images/00.png", "--out", "halves") == 2
    assert_one_line_error(capsys, "--out: halves has masks that are no predictions; give another")


def test_a_mask_of_the_input_size_equals_that_of_evaluation(run_of, recipes):
    run = run_of("halves")
    batch, measured, _ = evaluated(run)
    files = [f"{i}.png" for i in range(len(batch["image"]))]
    for file, image in zip(files, batch["image"], strict=True):
        Image.fromarray(image).save(recipes / file)
    fnet_command("predict", run, *files, "--out", "out", "--json")
    for i, labels in enumerate(measured.confusion[1]):
        result = np.asarray(Image.open(recipes / "out" / "masks" / f"{i}.png"))
        np.testing.assert_array_equal(result, labels)


def test_predicts_images_of_pillow_as_the_command(run_of, recipes, capsys):
    run = run_of("halves")
    names = [f"{i:02}" for i in range(5)]
    paths = [f"halves/images/{name}.png" for name in names]
    fnet_command("predict", run, *paths, "--out", "out")
    predictor = Predictor(run)
    assert (predictor.classes, predictor.step) == (vision_cases.CLASSES, 40)
    for given in (paths, [Image.open(path) for path in paths]):
        masks = predictor(given)
        assert len(masks) == len(names)
        for name, mask in zip(names, masks, strict=True):
            written = np.asarray(Image.open(recipes / "out" / "masks" / f"{name}.png"))
            np.testing.assert_array_equal(mask, written)
    assert predictor([]) == []
    # One image is compiled as a batch of its own.
    chex.assert_trees_all_equal(predictor(paths[:1])[0], masks[0])


def test_an_image_of_pillow_keeps_its_size_and_its_rotation(run_of, recipes):
    photo = Image.effect_noise((400, 200), 50)
    exif = photo.getexif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save(recipes / "photo.jpg", exif=exif)
    opened = Image.open(recipes / "photo.jpg")
    (mask,) = Predictor(run_of("halves"))([opened])
    assert mask.shape == (400, 200)
    assert opened.size == (400, 200)


def test_the_example_of_the_predictor(recipes):
    vision_cases.write_shapes_run(recipes)
    (recipes / "photos").mkdir()
    Image.new("RGB", (30, 20)).save(recipes / "photos" / "0.jpg")
    assert doctest.testmod(predictor_module) == (0, 7)


def test_masks_exclude_the_padding_of_an_image():
    logits = np.zeros((4, 4, 3), np.float32)
    logits[:2, :2, 0] = logits[:2, 2:, 1] = 1
    logits[2:, :, 2] = 1  # below the image
    prepared = PreprocessedImage(np.zeros((16, 16, 3), np.uint8), size=(40, 20), part=(16, 8))
    labels = predict_mask(logits, prepared)
    chex.assert_shape(labels, (20, 40))
    assert (labels[:18, :20] == 0).all()  # below, interpolation mixes both halves
    assert (labels[:18, 20:] == 1).all()


def test_images_of_the_same_name_get_files_of_their_own(run_of, recipes, capsys):
    run = run_of("halves")
    for folder in ("a", "b"):
        (recipes / "new" / folder).mkdir(parents=True)
        shutil.copy(recipes / "halves" / "images" / "00.png", recipes / "new" / folder / "x.png")
    output_of(capsys, "predict", run, "new/a", "new/b/x.png", "--out", "out")
    masks = sorted(str(p.relative_to(recipes / "out")) for p in recipes.glob("out/masks/**/*.png"))
    assert masks == ["masks/a/x.png", "masks/b/x.png"]
    Image.open(recipes / "new" / "a" / "x.png").save(recipes / "new" / "a" / "x.bmp")
    output_of(capsys, "predict", run, "new/a", "--out", "both")
    assert sorted(p.name for p in recipes.glob("both/masks/*")) == ["x.bmp.png", "x.png.png"]


def test_reads_digits_in_gray_at_their_size(saved, recipes, capsys):
    run = saved("digits")
    dataset = build(RunFolder(run).read_config()).dataset
    some = dataset.test["image"][:5]
    for i, image in enumerate(some):
        ink = np.round(255 * image[..., 0]).astype(np.uint8)
        Image.fromarray(ink).convert("RGB").save(recipes / f"{i}.png")
    prepared = np.stack([load("digits.py").data.preprocessor(f"{i}.png").image for i in range(5)])
    chex.assert_type(prepared, np.float32)
    chex.assert_trees_all_close(prepared, some, atol=1 / 255)
    output = output_of(capsys, "predict", run, *(f"{i}.png" for i in range(5)), "--top-k", 1)
    assert len(output.splitlines()) == 6
    assert all(line.split()[1] in dataset.classes for line in output.splitlines()[:5])


@pytest.mark.parametrize(("crops", "border"), [(1, 0), (2, 0), (10, 0), (10, 2)])
def test_prepares_images_like_test_images(crops, border, recipes):
    data = ImageFolder(path="colours", image_size=7, crops=crops, border=border)
    config = Config(data=data)
    batch = next(evaluation_batches(data.load(), 15))
    prepare = config.data.preprocessor
    assert prepare.shape == (7, 7, 3)
    files = sorted(recipes.glob("colours/val/*/*.png"))
    result = np.stack([prepare(str(path)).image for path in files])
    np.testing.assert_array_equal(result, batch["image"])


def test_prepares_images_like_test_images_with_masks(recipes):
    config = load("halves.py")
    dataset = build(config).dataset
    batch = next(evaluation_batches(dataset, 3))
    prepare = config.data.preprocessor
    result = {path: prepare(str(path)) for path in recipes.glob("halves/images/*.png")}
    for image in batch["image"]:
        assert any(np.array_equal(image, prepared.image) for prepared in result.values())
    for path, prepared in result.items():
        assert prepared.size == Image.open(path).size
        assert max(prepared.part) == 16


def test_reports_unreadable_images_and_predicts_the_others(run_of, recipes, capsys):
    run = run_of("colours")
    (recipes / "new").mkdir()
    (recipes / "new" / "a.png").write_bytes(b"no image")
    pages = [Image.open(recipes / "colours" / "val" / "red" / "0.png")] * 2
    pages[0].save(recipes / "new" / "b.tif", save_all=True, append_images=pages[1:])
    (recipes / "new" / "c.jpg").write_bytes(b"")
    (recipes / "new" / "notes.txt").write_text("no image")
    assert exit_code("predict", run, "new", "--json") == 2
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert [p["image"] for p in result["predictions"]] == ["new/b.tif"]
    assert [p["image"] for p in result["unreadable"]] == ["new/a.png", "new/c.jpg"]
    lines = output.err.splitlines()
    assert lines.pop(0) == "fnet: new: left out 1 files and folders: 1 x .txt"
    assert len(lines) == 3
    assert lines[0].startswith("fnet: images of several frames or pages, of which the first is ")
    assert lines[1].startswith("fnet: cannot read new/a.png: ")
    assert lines[2] == "fnet: cannot read new/c.jpg: zero bytes"
    assert exit_code("predict", run, "new/a.png", "--json") == 2
    assert json.loads(capsys.readouterr().out)["predictions"] == []


def test_does_not_need_the_data_if_the_run_has_class_names(run_of, recipes, capsys):
    folder = RunFolder(run_of("colours"))
    (folder.path / "classes.json").unlink(missing_ok=True)
    assert OpenRun(folder).outputs.names == vision_cases.CLASSES  # from the data
    write_classes(folder, Outputs(("a", "b", "c")))
    shutil.move(recipes / "colours" / "val" / "red" / "0.png", recipes / "x.png")
    shutil.rmtree(recipes / "colours")
    assert OpenRun(folder).outputs.names == ("a", "b", "c")
    assert "x.png  c " in output_of(capsys, "predict", folder.path, "x.png")
    for text in ("{", '{"classes": []}', '{"classes": [1, 2]}', "[]"):
        (folder.path / "classes.json").write_text(text)
        with pytest.raises(UserError, match=r"cannot read .*classes\.json: "):
            OpenRun(folder).outputs  # noqa: B018 (a property)


def test_refuses_numbers_of_channels_that_image_files_lack():
    assert Synthetic(channels=1, image_size=5).preprocessor.shape == (5, 5, 1)
    assert Digits().preprocessor.shape == (8, 8, 1)
    assert SegmentationFolder(image_size=9).preprocessor.shape == (9, 9, 3)
    with pytest.raises(UserError, match="synthetic has images of 4 channels"):
        Synthetic(channels=4).preprocessor  # noqa: B018


MISTAKES = [
    (("colours",), "missing FILE; usage: fnet predict RUN FILE"),
    (("colours", "--top-k", "2"), "missing FILE before the flags; usage: fnet predict RUN FILE"),
    (("colours", "colours", "--top-k", "0"), "--top-k: expected greater than or equal to 1, got 0"),
    (("colours", "colours", "--top-k", "few"), "--top-k: expected an integer, got few"),
    (("colours", "colours", "--topk", "1"), "unknown option --topk (did you mean --top-k?)"),
    (("colours", "--json", "colours"), "missing FILE before the flags; usage: fnet predict RUN FILE..."),
    (("colours", "nowhere.png"), "no image nowhere.png: there is no such file or folder"),
    (("colours", "colours", "nowhere.png"), "no image nowhere.png: there is no such file or folder"),
    (("colours", "empty"), "no image in empty; expected files *.jpg"),
    (("colours", "colours"), "no checkpoint in "),
    (("halves", "halves"), "no checkpoint in "),
    (("nowhere", "colours"), "no run in runs/nowhere: it has no config.json"),
    (("text", "colours"), "runs/text is a run of language_model, which predicts no labels"),
    (("noise", "colours"), "runs/noise is a run of denoiser, which predicts no labels"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2(words, message, begun, recipes, capsys):
    head = "from train.config import *\ndef config(): return Config("
    (recipes / "text.py").write_text(f"{head}data=TextFile(), model=LanguageModel())")
    (recipes / "noise.py").write_text(f"{head}model=Denoiser())")
    (recipes / "empty").mkdir()
    if words[0] != "nowhere":
        begun(words[0])
    assert exit_code("predict", f"runs/{words[0]}", *words[1:]) == 2
    assert_one_line_error(capsys, message)


def test_suggests_a_run_of_a_similar_name(begun, recipes, capsys):
    begun("halves")
    (recipes / "runs" / "half").mkdir()  # of no run
    assert exit_code("predict", "runs/halfes", "halves") == 2
    error = "no run in runs/halfes: it has no config.json (did you mean runs/halves?)"
    assert_one_line_error(capsys, error)
    assert exit_code("eval", "runs/digits") == 2
    assert "did you mean" not in capsys.readouterr().err


def test_reports_a_folder_that_cannot_be_written(run_of, capsys):
    assert exit_code("predict", run_of("halves"), "halves/images", "--out", "halves.py") == 2
    assert "fnet: cannot write halves.py: " in capsys.readouterr().err


def test_prints_a_mark_for_bytes_that_are_not_utf_8(run_of, recipes, capsys):
    run = run_of("colours")
    name = os.fsdecode(b"caf\xe9.png")
    shutil.copy(recipes / "colours" / "val" / "red" / "0.png", recipes / name)
    assert "caf\ufffd.png  red " in output_of(capsys, "predict", run, name)
    result = predict(RunFolder(run), [name], PredictArguments())
    text = io.StringIO()
    print_predictions(result, Console(file=text, force_terminal=True, width=100))
    assert "caf\ufffd.png" in text.getvalue()


def test_predictor_takes_arrays_contents_and_any_number_of_images(run_of, recipes):
    predictor = Predictor(run_of("colours"))
    path = next((recipes / "colours" / "val").rglob("*.png"))
    pixels = np.asarray(Image.open(path))
    (expected,) = predictor([path])
    opaque, content = np.dstack([pixels, pixels[..., :1]]), path.read_bytes()
    contents = content, bytearray(content), memoryview(content), io.BytesIO(content)
    for image in (str(path), *contents, pixels, opaque, jnp.asarray(pixels), Image.open(path)):
        np.testing.assert_array_equal(predictor([image])[0], expected)
    rows = [pixels] * 3
    for several in (rows, iter(rows), np.stack(rows), np.array([str(path)] * 3)):
        np.testing.assert_array_equal(predictor(several), [expected] * 3)
    assert predictor([]) == []
    assert predictor._network._cache_size() == 1  # one program for 1 and 3 images


def test_predictor_names_what_is_wrong_with_an_image(run_of, recipes):
    predictor = Predictor(run_of("colours"))
    (recipes / "empty.png").touch()
    with pytest.raises(UnreadableError, match="zero bytes"):
        predictor(["empty.png"])
    with pytest.raises(UnreadableError, match="range is undefined"):
        predictor([Image.new("F", (4, 4))])
    with pytest.raises(UnreadableError, match=r"^none\.png: No such file or directory$"):
        predictor(["none.png"])
    with pytest.raises(UnreadableError, match=r"^image 1: the array is float64 of shape"):
        predictor([np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3))])
    for wrong in (None, [1, 2]):
        with pytest.raises(TypeError, match=r"image 0: expected a path, .* got (NoneType|list)$"):
            predictor([wrong])
    with pytest.raises(TypeError, match=r"image 0: expected a path, .* got StringIO$"):
        predictor([io.StringIO("none.png")])  # a file that is opened as text
    pixels = np.zeros((4, 4, 3), np.uint8)
    for one in ("none.png", b"", io.BytesIO(), pixels, jnp.asarray(pixels), Image.new("L", (4, 4))):
        with pytest.raises(TypeError, match=r"got one; write predictor\(\[image\]\)$"):
            predictor(one)


def test_batches_are_no_larger_than_in_training(run_of, recipes, monkeypatch):
    folder = RunFolder(run_of("colours"))
    config = folder.read_config()
    sizes = []

    def padded(arrays, rows):
        sizes.append(rows)
        return data.pad_batch(arrays, rows)

    monkeypatch.setattr("train.predictor.pad_batch", padded)
    for batch_size, crops, expected in ((20, 1, 16), (4, 1, 4), (4, 2, 2), (4, 10, 1)):
        changed = dataclasses.replace(config.data, batch_size=batch_size, crops=crops)
        few = dataclasses.replace(config, data=changed)
        folder.write_config(few)
        predict(folder, ["colours/val"], PredictArguments(json=True))
        assert set(sizes) == {expected}
        sizes.clear()
