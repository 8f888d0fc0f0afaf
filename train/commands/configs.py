"""``fnet configs``: list the recipes."""

from train.arguments import ConfigsArguments, read_command
from train.config.recipes import recipes


def main(argv: list[str]) -> None:
    """Run ``fnet configs``."""
    read_command(argv, "fnet configs", ConfigsArguments)
    first_lines = recipes()
    width = max(map(len, first_lines))
    for name, line in first_lines.items():
        print(f"{name:{width}}  {line}")
