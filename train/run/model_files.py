"""Files of a published model that a run keeps: its config and its tokenizer."""

from pathlib import Path

from train.config import Config
from train.data.model_folder import SMALL_FILES
from train.data.text import Text
from train.errors import UserError
from train.networks.pretrained import Pretrained
from train.run.run_folder import RunFolder


def copy_model_files(folder: RunFolder, config: Config) -> None:
    """Copy a published model's config and tokenizer to the run; the weights stay where they are."""
    if not isinstance(config.model, Pretrained):
        return
    source = Path(config.model.path)
    try:
        folder.model.mkdir(exist_ok=True)
        copy_small_files(folder.model, source)
    except OSError as error:
        raise UserError(
            f"cannot copy {source} to {folder.model}: {error.strerror or error}"
        ) from error


def check_model(folder: RunFolder, config: Config) -> Config:
    """Return the config of a run, whose published model must be where it was."""
    model = config.model
    if isinstance(model, Pretrained) and not Path(model.path).is_dir():
        raise UserError(
            f"model.path: {model.path} is not a folder; if the model was moved, change "
            f"model.path in {folder.config}"
        )
    return config


def copy_small_files(to: Path, *sources: Path) -> None:
    """Copy config and tokenizer, each from the first source that has it.

    Raises:
      OSError: if a file cannot be read or written.
    """
    for name in SMALL_FILES:
        found = [source / name for source in sources if (source / name).is_file()]
        if found:
            (to / name).write_bytes(found[0].read_bytes())


def with_model_files(folder: RunFolder, config: Config) -> Config:
    """Return the config with the run's own tokenizer of a published model.

    So a tokenizer that changes later does not change the run.
    """
    tokenizer, text = folder.model / "tokenizer.json", config.data
    if not config.model.is_published or not tokenizer.is_file():
        return config
    if not isinstance(text, Text) or text.tokenizer is not None:
        return config
    return config.replace(data=text.replace(tokenizer=str(tokenizer)))
