"""``fnet configs``: list the recipes."""

from train.arguments import ConfigsArguments
from train.config.recipes import recipes


def main(words: list[str], options: ConfigsArguments) -> None:
    """Run ``fnet configs``."""
    first_lines = recipes()
    width = max(map(len, first_lines))
    for name, line in first_lines.items():
        print(f"{name:{width}}  {line}")
