"""``fnet sample``: text, images and mistakes."""

import json
import shutil

import jax
import numpy as np
import pytest
from image_cases import write_class_folders
from matplotlib import image as pictures
from program_cases import assert_one_line_error, exit_code, fnet_command, output_of

import fnet
from train.arguments import TextArguments
from train.config import Config, Denoiser, Digits
from train.config.recipes import load
from train.data import Outputs
from train.run import generation
from train.run.checkpoints import RestoredNetwork
from train.run.evaluation import Evaluator
from train.run.generation import TextGenerator
from train.run.open_run import OpenRun, write_classes
from train.run.run_folder import RunFolder, read_sealed, seal
from train.run.setup import setup

TEXT = """
from train.config import Config, LanguageModel, Optim, TextFile, Train

def config():
    return Config(
        name="text",
        data=TextFile(path="text.txt", context=16, batch_size=8),
        model=LanguageModel(blocks=2, width=16, heads=2, attention_context="lagged"),
        optim=Optim(name="adamw", learning_rate=0.01),
        train=Train(steps=20, log_every=20, eval_every=20),
    )
"""

IMAGES = """
from train.config import Config, Denoiser, Digits, Optim, Train

def config():
    return Config(
        name="images",
        data=Digits(batch_size=8, max_shift=0),
        model=Denoiser(patch=4, blocks=2, width=16, heads=2, steps=20, attention_context="lagged"),
        optim=Optim(name="adamw", learning_rate=0.01, ema_decay=0.5),
        train=Train(steps=4, log_every=4, eval_every=4),
    )
"""

pytestmark = pytest.mark.usefixtures("recipes", "rendered")


@pytest.fixture
def recipes(workplace):
    """Recipes in the workplace and a training text."""
    (workplace / "text.py").write_text(TEXT)
    (workplace / "images.py").write_text(IMAGES)
    (workplace / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    return workplace


@pytest.fixture
def run_of(recipes, shelf, capsys):
    """``run_of(recipe, *overrides)``: folder of a finished run, which is trained once."""

    def find(recipe, *overrides):
        if not (shelf / recipe).exists():
            fnet_command("train", f"{recipe}.py", "--out", shelf / recipe, *overrides)
        capsys.readouterr()
        return shutil.copytree(shelf / recipe, recipes / recipe)

    return find


@pytest.mark.slow
def test_text_continues_the_prompt_and_depends_on_the_seed(run_of, capsys):
    run_of("text")
    text = output_of(capsys, "sample", "text", "--prompt", "to be", "--length", 40)
    assert text.startswith("to be")
    assert len(text.encode()) > len("to be\n")
    assert text.endswith("\n")
    assert output_of(capsys, "sample", "text", "--prompt", "to be", "--length", 40) == text
    other = output_of(capsys, "sample", "text", "--prompt", "to be", "--length", 40, "--seed", 1)
    assert other.startswith("to be")
    assert other != text


@pytest.mark.slow
def test_text_is_streamed(run_of, capsys):
    run = OpenRun(RunFolder(run_of("text")))
    options = TextArguments(prompt=("to be",), length=40)
    generator = TextGenerator(run, options)
    later = [part for (part,) in generator.stream([generator.encode("to be")], [0])]
    assert len(later) >= 3
    whole = "to be" + "".join(later) + "\n"
    assert output_of(capsys, "sample", "text", "--prompt", "to be", "--length", 40) == whole


@pytest.mark.slow
def test_prompts_are_answered_as_each_is_alone(run_of, recipes, capsys):
    run_of("text")
    prompts = ["to be", 'question"', "to", "or not to be, that is"]
    options = "--length", 20, "--repetition-penalty", 1.2, "--min-p", 0.05
    output = output_of(capsys, "sample", "text", "--prompt", *prompts, "--batch-size", 3, *options)
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    for seed, answer in enumerate(answers):
        prompt = answer["prompt"]
        alone = output_of(capsys, "sample", "text", "--prompt", prompt, *options, "--seed", seed)
        assert prompt + answer["answer"] + "\n" == alone

    (recipes / "prompts.txt").write_text("\n\n".join(prompts))
    (recipes / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    for name in ("prompts.txt", "prompts.jsonl"):
        assert (
            output_of(capsys, "sample", "text", "--prompts", name, "--batch-size", 2, *options)
            == output
        )


@pytest.mark.slow
def test_a_stop_text_ends_the_text_and_is_not_printed(run_of, capsys):
    run_of("text")
    words = "text", "--prompt", "to be", "--length", 60
    whole = output_of(capsys, "sample", *words)
    stop = whole[12:15]
    end = whole.index(stop, 5)
    assert output_of(capsys, "sample", *words, "--stop", "never", stop) == whole[:end] + "\n"
    # Half of a stop text is printed if the other half does not come.
    assert output_of(capsys, "sample", *words, "--stop", whole[-5:-1] + "never") == whole


@pytest.mark.slow
def test_sampling_text_does_not_need_the_training_text(run_of, recipes, capsys):
    run_of("text")
    (recipes / "text.txt").unlink()
    assert output_of(capsys, "sample", "text/config.json", "--length", 3).startswith("\n")


@pytest.mark.slow
def test_continues_a_prompt_that_is_not_utf_8(run_of, capsys):
    run_of("text")
    text = output_of(capsys, "sample", "text", "--prompt", "to be\udcff", "--length", 3)
    assert text.startswith("to be\ufffd")


@pytest.fixture
def tokenizer(recipes):
    """File of a tokenizer with one token per word and one for unknown words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    vocabulary = {word: i for i, word in enumerate([*words, ",", "[UNK]"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(recipes / "words.json"))
    return recipes / "words.json"


@pytest.mark.slow
def test_samples_with_a_tokenizer(tokenizer, capsys):
    fnet_command("train", "text.py", "--out", "words", "--data.tokenizer", "words.json")
    capsys.readouterr()
    text = output_of(capsys, "sample", "words", "--prompt", "to be", "--length", 8)
    assert text.startswith("to be ")
    assert len(text.split()) == 2 + 8

    assert exit_code("sample", "words", "--prompt", "to err") == 2
    assert capsys.readouterr().err == "fnet: words.json has no token for some of 'to err'\n"
    assert exit_code("sample", "words", "--prompt", "to\udcff") == 2
    assert_one_line_error(capsys, "words.json reads only UTF-8, and symbol 2 of the text is not")
    assert exit_code("sample", "words", "--prompt", "\n") == 2
    assert "--prompt: is empty" in capsys.readouterr().err
    tokenizer.unlink()
    assert exit_code("sample", "words", "--prompt", "to be") == 2
    assert "data.tokenizer: no file words.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_has_no_end_token(tokenizer, monkeypatch, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "$A ,", special_tokens=[(",", 8)]
    )
    made.save(str(tokenizer))
    words = "--data.tokenizer", "words.json", "--train.steps", 1
    fnet_command("train", "text.py", "--out", "words", *words)
    read = []
    stream = lambda *given, **_: read.append(given[3].tolist()) or iter(())  # noqa: E731
    monkeypatch.setattr(fnet, "stream", stream)
    capsys.readouterr()
    assert output_of(capsys, "sample", "words", "--prompt", "to be") == "to be\n"
    assert read == [[[0, 1]]]


@pytest.mark.slow
def test_draws_one_row_of_images_per_label(run_of, recipes, capsys):
    run_of("images")
    path = output_of(capsys, "sample", "images", "--count", 2).strip()
    assert path == "images/samples.png"
    whole = pictures.imread(recipes / path)
    output_of(
        capsys, "sample", "images", "--count", 2, "--steps", 3, "--labels", 3, 7, "--out", "two.png"
    )
    two = pictures.imread(recipes / "two.png")
    # The first picture has ten rows, the second one two.
    assert whole.shape[0] > 3 * two.shape[0]
    assert whole.shape[1] == two.shape[1]
    assert np.ptp(two[..., :3]) > 0.5


@pytest.mark.slow
def test_refuses_to_sample_if_class_names_changed(run_of, recipes, capsys):
    run_of("images")
    path = recipes / "images" / "classes.json"
    content = json.dumps(read_sealed(path)).replace('"3"', '"three"')
    path.write_text(json.dumps(seal(json.loads(content))))
    assert exit_code("sample", "images", "--labels", 3) == 2
    assert_one_line_error(capsys, "label 3 was three, is 3")


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["dpm_solver", "ddpm"])
def test_the_same_seed_gives_the_same_images(sampler, run_of, recipes):
    run_of("images")

    def recorded(seed):
        words = ("--labels", 3, "--count", 1, "--sampler", sampler, "--steps", 3)
        (recipes / "a.png").unlink(missing_ok=True)
        fnet_command("sample", "images", *words, "--seed", seed, "--out", "a.png")
        return pictures.imread(recipes / "a.png")

    first = recorded(0)
    np.testing.assert_array_equal(recorded(0), first)
    assert not np.array_equal(recorded(1), first)


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
def test_a_mistake_is_one_line_with_exit_code_2(words, message, recipes, capsys, monkeypatch):
    folder = RunFolder(recipes / words[0])
    folder.path.mkdir()
    folder.create()
    folder.write_config(load(f"{words[0]}.py"))
    write_classes(folder, Outputs(tuple("0123456789")))
    network = RestoredNetwork({}, {}, 0)
    monkeypatch.setattr(OpenRun, "network", lambda *_, **__: (None, network))
    monkeypatch.setattr(generation, "sample_images", lambda *a: np.zeros((len(a[4]), 8, 8, 1)))
    before = {p: p.read_bytes() for p in recipes.rglob("*") if p.is_file()}
    assert exit_code("sample", *words) == 2
    assert_one_line_error(capsys, message)
    assert before == {p: p.read_bytes() for p in recipes.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_refuses_a_run_that_generates_nothing(capsys):
    fnet_command("train", "tiny.py", "--out", "run", "--train.steps", 1)
    capsys.readouterr()
    assert exit_code("sample", "run") == 2
    assert_one_line_error(
        capsys, "run is a run of preact_resnet, which generates nothing; expected"
    )


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
    (("text.py", "--data.path", "empty.txt"), "data.path: empty.txt is too short"),
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
    (recipes / "empty.txt").write_text("")
    write_class_folders(recipes / "photos")
    assert exit_code("train", *words, "--out", "new") == 2
    assert_one_line_error(capsys, message)
    assert not (recipes / "new").exists()


@pytest.mark.slow
def test_the_test_loss_of_a_denoiser_does_not_depend_on_the_batch_size():
    model = Denoiser(patch=4, blocks=1, width=8, heads=2, steps=20)
    run = setup(Config(data=Digits(batch_size=64), model=model))
    state = jax.jit(run.init)(jax.random.key(0))
    whole, parts = (
        Evaluator(run.task, n, run.state_shapes)(state).metrics["loss"] for n in (64, 16)
    )
    assert parts == pytest.approx(whole, rel=1e-5)
