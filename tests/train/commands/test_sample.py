"""``fnet sample``: text, images and mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from image_cases import write_class_folders
from matplotlib import image as pictures
from program_cases import assert_one_line_error, exit_code, initial_run, output_of

import fnet
from train.arguments import TextArguments
from train.commands.sample import read_prompts
from train.config import Config, Denoiser, Digits, LanguageModel, TextFile
from train.data import Outputs
from train.run import generation
from train.run.checkpoints import RestoredNetwork
from train.run.open_run import OpenRun, write_classes
from train.run.run_folder import RunFolder

MODEL = LanguageModel(blocks=2, width=16, heads=2, attention_context="lagged")
TEXT = Config(data=TextFile(path="text.txt", context=16, batch_size=8), model=MODEL)
DENOISER = Denoiser(patch=4, blocks=2, width=16, heads=2, steps=20, attention_context="lagged")
IMAGES = Config(data=Digits(batch_size=8, max_shift=0), model=DENOISER)
CONFIGS = {"text": TEXT, "images": IMAGES}

pytestmark = pytest.mark.usefixtures("recipes")


@pytest.fixture
def recipes(workplace):
    """Recipes in the workplace and a training text."""
    for name, config in CONFIGS.items():
        text = f"from train.config import *\ndef config(): return {config!r}"
        (workplace / f"{name}.py").write_text(text)
    (workplace / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    return workplace


@pytest.mark.slow
def test_continues_a_prompt_that_is_not_utf_8_without_the_training_text(recipes, capsys):
    initial_run("text", TEXT)
    (recipes / "text.txt").unlink()
    words = "sample", "text/config.json", "--length", 3, "--prompt", "to be\udcff"
    text = output_of(capsys, *words)
    assert text.startswith("to be\ufffd")
    assert output_of(capsys, *words, "--seed", 1) != text


def test_prompts_are_read_from_a_file(recipes):
    prompts = ["to be", 'question"', "or not"]
    (recipes / "prompts.txt").write_text("\n\n".join(prompts))
    (recipes / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    for name in ("prompts.txt", "prompts.jsonl"):
        assert read_prompts(TextArguments(prompts=name)) == prompts


@pytest.mark.parametrize(
    ("stop", "printed"),
    [(("never", "c ab"), "ab "), (("efghx",), "ab c ab cdefgh"), ((), "ab c ab cdefgh")],
)
def test_a_stop_text_ends_the_text_and_is_not_printed(stop, printed, monkeypatch, capsys):
    """Half of a stop text is printed if the other half does not come."""
    chunks = [np.frombuffer(b, np.uint8)[None] for b in (b" c", b" ab c", b"def", b"gh")]
    monkeypatch.setattr(OpenRun, "network", lambda *_, **__: (None, RestoredNetwork({}, {}, 0)))
    monkeypatch.setattr(fnet, "stream", lambda *_, **__: iter(chunks))
    folder = RunFolder(Path("text"))
    folder.create()
    folder.write_config(TEXT)
    flags = ("--stop", *stop) if stop else ()
    assert output_of(capsys, "sample", "text", "--prompt", "ab", *flags) == f"{printed}\n"


@pytest.mark.slow
def test_samples_with_a_tokenizer(recipes, capsys):
    """It has one token per word and one for unknown words."""
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    vocabulary = {word: i for i, word in enumerate([*words, ",", "[UNK]"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("words.json")
    initial_run("words", TEXT.replace(data=TEXT.data.replace(tokenizer="words.json")))
    text = output_of(capsys, "sample", "words", "--prompt", "to be", "--length", 8)
    assert text.startswith("to be ")
    assert len(text.split()) == 2 + 8

    assert exit_code("sample", "words", "--prompt", "to err") == 2
    assert capsys.readouterr().err == "fnet: words.json has no token for some of 'to err'\n"
    assert exit_code("sample", "words", "--prompt", "to\udcff") == 2
    assert_one_line_error(capsys, "words.json reads only UTF-8, and symbol 2 of the text is not")
    assert exit_code("sample", "words", "--prompt", "\n") == 2
    assert "--prompt: is empty" in capsys.readouterr().err
    Path("words.json").unlink()
    assert exit_code("sample", "words", "--prompt", "to be") == 2
    assert "data.tokenizer: no file words.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_seed_gives_the_same_images(rendered, capsys):
    folder = initial_run("images", IMAGES)

    def recorded(seed):
        words = ("--labels", 3, "--count", 1, "--steps", 3, "--seed", seed)
        assert output_of(capsys, "sample", "images", *words) == "images/samples.png\n"
        image = pictures.imread(folder.samples)
        folder.samples.unlink()
        return image

    first = recorded(0)
    np.testing.assert_array_equal(recorded(0), first)
    assert not np.array_equal(recorded(1), first)
    write_classes(folder, Outputs((*"012", "three", *"456789")))
    assert exit_code("sample", "images", "--labels", 3) == 2
    assert_one_line_error(capsys, "label 3 was three, is 3")


def test_refuses_a_run_that_generates_nothing(capsys):
    folder = RunFolder(Path("run"))
    folder.create()
    folder.write_config(Config())
    assert exit_code("sample", "run") == 2
    assert_one_line_error(
        capsys, "run is a run of preact_resnet, which generates nothing; expected"
    )


def words_of(value):
    return " ".join(value) if isinstance(value, tuple) else ""


MISTAKES = [
    (("text", "--prompt", ""), "--prompt: is empty; give at least one character"),
    (("text", "--length", "0"), "--length: expected greater than or equal to 1, got 0"),
    (("text", "--temperature", "-1"), "--temperature: expected greater than or equal to 0, got -1.0"),
    (("text", "--top-k", "0"), "--top-k: expected greater than or equal to 1, got 0"),
    (("text", "--top-p", "0"), "--top-p: expected greater than 0, got 0.0"),
    (("text", "--top-p", "1.5"), "--top-p: expected less than or equal to 1, got 1.5"),
    (("text", "--seed", "-1"), "--seed: expected greater than or equal to 0, got -1"),
    (("text", "--min-p", "2"), "--min-p: expected less than or equal to 1, got 2.0"),
    (("text", "--repetition-penalty", "0"), "--repetition-penalty: expected greater than 0, got 0.0"),
    (("text", "--prompt", "a", "--prompts", "b"), "--prompts: is a file in place of --prompt"),
    (("text", "--prompts", "none.txt"), "--prompts: none.txt does not exist"),
    (("text", "--prompt", "a", "--prompt", "b"), "--prompt: given twice"),
    (("text", "--promt", "to"), "unknown option --promt (did you mean --prompt?)"),
    (("text", "--labels", "3"), "unknown option --labels"),
    (("text", "to be"), "unexpected to be"),
    (("images", "--steps", "21"), "--steps: expected at most model.steps 20, got 21"),
    (("images", "--steps", "0"), "--steps: expected greater than or equal to 1, got 0"),
    (("images", "--count", "0"), "--count: expected greater than or equal to 1, got 0"),
    (("images", "--labels", "3", "eleven"), "--labels: expected some of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, got eleven"),
    (("images", "--guidance", "-1"), "--guidance: expected greater than or equal to 0, got -1.0"),
    (("images", "--guidance", "inf"), "--guidance: expected a finite number, got inf"),
    (("images", "--sampler", "euler"), "--sampler: expected one of dpm_solver, ddim, ddpm, got euler"),
    (("images", "--prompt", "to"), "unknown option --prompt"),
    (("images", "--out", "nowhere/a.png"), "cannot write nowhere/a.png"),
    (("images", "--out", "a.docx"), "cannot write a.docx"),
    (("images", "--out", "images"), "cannot write images: "),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=words_of)
def test_a_mistake_is_one_line_with_exit_code_2(
    words, message, recipes, rendered, capsys, monkeypatch
):
    folder = RunFolder(recipes / words[0])
    folder.path.mkdir()
    folder.create()
    folder.write_config(CONFIGS[words[0]])
    write_classes(folder, Outputs(tuple("0123456789")))
    network = RestoredNetwork({}, {}, 0)
    monkeypatch.setattr(OpenRun, "network", lambda *_, **__: (None, network))
    monkeypatch.setattr(generation, "sample_images", lambda *a: np.zeros((len(a[4]), 8, 8, 1)))
    before = {p: p.read_bytes() for p in recipes.rglob("*") if p.is_file()}
    assert exit_code("sample", *words) == 2
    assert_one_line_error(capsys, message)
    assert before == {p: p.read_bytes() for p in recipes.rglob("*") if p.is_file()}


@pytest.mark.parametrize("words", [(), ("--prompt", "to")])
def test_refuses_a_missing_run(words, capsys):
    assert exit_code("sample", *words) == 2
    assert_one_line_error(capsys, "missing RUN")
    assert exit_code("sample", "nowhere", *words) == 2
    assert_one_line_error(
        capsys, "no run or model nowhere; give a published model's folder, or download one"
    )


FOLDER = "--data.source", "image_folder", "--data.path", "photos", "--data.image-size", "8"
PHOTOS = "images.py", *FOLDER
TRAINING_MISTAKES = [
    (("text.py", "--model.heads", "3"), "heads must divide width, got heads=3, width=16"),
    (("text.py", "--model.window", "0"), "model.window: expected greater than or equal to 1, got 0"),
    (("text.py", "--model.mixers", "mambo"), "--model.mixers: expected"),
    (("text.py", "--data.path", "short.txt"), "data.path: short.txt is too short"),
    (("text.py", "--data.source", "digits"), "data.source: digits has no text"),
    (("text.py", "--data.path", "none.txt"), "data.path: none.txt does not exist"),
    (("text.py", "--model.name", "denoiser"), "data.source: text_file has no images"),
    (("images.py", "--model.name", "language_model"), "data.source: digits has no text"),
    (("images.py", "--model.heads", "3"), "heads must divide width, got heads=3, width=16"),
    (("images.py", "--model.patch", "3"), "patch must divide height and width, got patch=3"),
    ((*PHOTOS, "--data.mixup", "0.2"), "data.mixup: 0.2, but a denoiser needs one label per image"),
    ((*PHOTOS, "--data.crops", "10"), "data.crops: 10, but a denoiser needs one crop per image"),
    (("images.py", "--optim.label-smoothing", "0.1"), "optim.label_smoothing: 0.1, but the loss of images has none"),
    (("images.py", "--model.steps", "1"), "model.steps: expected greater than or equal to 2, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), TRAINING_MISTAKES, ids=words_of)
def test_refuses_invalid_networks_before_training(words, message, recipes, capsys):
    (recipes / "short.txt").write_text("to be")
    write_class_folders(recipes / "photos")
    assert exit_code("train", *words, "--out", "new") == 2
    assert_one_line_error(capsys, message)
    assert not (recipes / "new").exists()
