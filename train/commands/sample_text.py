"""Text from a trained language model, as it is drawn."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import fnet
from train.arguments import TextArguments
from train.config import Config, LanguageModel, TextFile
from train.data.tokenizer import tokens_of
from train.errors import UserError
from train.run.checkpoint import Checkpoints
from train.run.run_folder import RunFolder
from train.tasks import language


def continued(folder: RunFolder, config: Config, a: TextArguments) -> Iterator[str]:
    """The prompt, and then what the model adds, piece by piece.

    Attention looks as far back as it was trained to, and no further: its window is the
    training rows' length where it has none.

    Raises:
      UserError: for an empty prompt, one that the vocabulary cannot write, or a run
        without a checkpoint.
    """
    text, model = config.data, config.model
    assert isinstance(text, TextFile)
    assert isinstance(model, LanguageModel)
    vocabulary = tokens_of(text)
    prompt = vocabulary.prompt(a.prompt)
    if not len(prompt):
        raise UserError("--prompt: is empty; give at least one symbol to go on from")
    window = min(model.window or text.context, text.context)
    network = language.model_of(
        dataclasses.replace(config, model=dataclasses.replace(model, window=window))
    )
    with Checkpoints(folder.checkpoints, best=a.best) as checkpoints:
        params, state, _ = checkpoints.restore_network(network.init)

    pieces = fnet.stream(
        network,
        params,
        state,
        jnp.asarray(prompt.astype(np.int32))[None],
        jax.random.key(a.seed),
        a.length,
        temperature=a.temperature,
        top_k=a.top_k,
        top_p=a.top_p,
    )
    # Bytes that are no text cannot be shown; the model has read them as they are.
    yield a.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    # Read together with the prompt: what stands between two tokens depends on both.
    read = prompt.tolist()
    said = len(vocabulary.decode(read))
    for piece in pieces:
        read += np.asarray(piece)[0].tolist()
        # A symbol may end in the next piece: until then its bytes are no text.
        whole = vocabulary.decode(read).rstrip("\ufffd")
        yield whole[said:]
        said = max(said, len(whole))
    yield vocabulary.decode(read)[said:]
