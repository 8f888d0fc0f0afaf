"""``fnet sample``: text or images from a trained model."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np

from train import arguments
from train.arguments import ImageArguments, TextArguments
from train.data import records, storage
from train.data.chat import Message
from train.data.columns import decode_text
from train.errors import UserError, printable
from train.run.generation import TextGenerator, draw_images
from train.run.open_run import OpenRun


def main(words: list[str], flags: list[str]) -> None:
    """Run ``fnet sample RUN``."""
    opened, prog = OpenRun.of(words[0], or_model=True), f"fnet sample {words[0]}"
    generates = opened.kind.generates
    if generates == "text":
        generate_text(opened, arguments.read(TextArguments, flags, prog))
    elif generates == "images":
        path = draw_images(opened, arguments.read(ImageArguments, flags, prog))
        print(printable(str(path)))
    else:
        raise UserError(
            f"{opened.folder.path} is a run of {opened.config.model.name}, which generates "
            "nothing; expected a run of language_model or pretrained (text) or denoiser (images)"
        )


def generate_text(opened: OpenRun, options: TextArguments) -> None:
    """Print what the model adds to a prompt after it, or the answers to prompts as JSON lines.

    With ``--chat``, answers come alone; without prompts, lines of the input are answered.
    """
    prompts = read_prompts(options)
    generator = TextGenerator(opened, options)
    if options.chat and not prompts:
        _chat(generator)
    elif len(prompts) > 1 or options.prompts is not None:
        for prompt, answer in zip(prompts, generator.answers(prompts), strict=True):
            print(json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False), flush=True)
    else:
        prompt = prompts[0] if prompts else "\n"
        tokens = generator.encode(prompt)
        if not options.chat:
            # The model reads any bytes, but only valid UTF-8 can be printed.
            prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            print(prompt, end="", flush=True)
        _print_answer(generator, tokens)


def _print_answer(generator: TextGenerator, tokens: np.ndarray) -> str:
    answer = ""
    for (part,) in generator.stream([tokens], [generator.options.seed]):
        print(part, end="", flush=True)
        answer += part
    print()
    return answer


def _chat(generator: TextGenerator) -> None:
    messages: list[Message] = []
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    with contextlib.suppress(EOFError):
        while True:
            message = input("> " if is_terminal else "")
            if not message.strip():
                continue
            answer = _print_answer(generator, generator.encode(message, messages))
            messages.append({"role": "user", "content": message})
            messages.append({"role": "assistant", "content": answer})


def read_prompts(options: TextArguments) -> list[str]:
    """Return the prompts of the flags or of a file."""
    path = options.prompts
    if path is None:
        return list(options.prompt)
    if options.prompt:
        raise UserError("--prompts: is a file in place of --prompt; give one of them")
    if Path(path.removesuffix(".gz")).suffix in (".jsonl", ".parquet"):
        prompts = [record.text("prompt") for record in records.read(path, "--prompts")]
    else:
        with storage.reported("--prompts", path), storage.open_file(path) as file:
            text = decode_text(file.read(), path, "--prompts", "surrogateescape")
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UserError(f"--prompts: {path} holds no prompts")
    return prompts
