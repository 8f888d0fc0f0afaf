"""``fnet configs``: list the recipes."""

from train import arguments
from train.arguments import ConfigsArguments
from train.commands.positional import positional
from train.config.recipes import recipes


def main(argv: list[str]) -> None:
    """Run ``fnet configs``."""
    _, flags = positional(argv, "fnet configs", ConfigsArguments)
    arguments.read(ConfigsArguments, flags, "fnet configs")
    first_lines = recipes()
    width = max(map(len, first_lines))
    for name, line in first_lines.items():
        print(f"{name:{width}}  {line}")
