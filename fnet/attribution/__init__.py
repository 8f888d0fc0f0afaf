"""Training data attribution: which training examples made a prediction better or worse.

A score says how much a training example lowers the loss of a test example: positive is helpful,
negative harmful. Each method takes any loss of `fnet.autodiff`, ``loss(params, *batch) -> losses
[batch]``. `InRun` scores while a network trains. `tracin`, `ekfac` and `trak` score from
checkpoints: they return a function of a training batch, and `Scores.of` calls it for all batches.
`kfac` and `fisher_diagonal` are the curvature that influence functions and optimizers use.
"""

from fnet.attribution.curvature import fisher_diagonal as fisher_diagonal
from fnet.attribution.curvature import kfac as kfac
from fnet.attribution.ekfac import ekfac as ekfac
from fnet.attribution.in_run import InRun as InRun
from fnet.attribution.in_run import InRunState as InRunState
from fnet.attribution.scores import Scores as Scores
from fnet.attribution.tracin import tracin as tracin
from fnet.attribution.trak import trak as trak
