"""In-run scores: how much each training example lowers the test loss while the network trains."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from train.config.gradient import Built, GradientMode
from train.config.section import Count
from train.errors import UserError

if TYPE_CHECKING:
    import optax

    from train.config import Config
    from train.data import Dataset


@dataclass(frozen=True)
class Attribution(GradientMode):
    """Gradient of the mean loss, and scores of training examples, which find wrong labels."""

    is_per_example: ClassVar[bool] = True
    has_fixed_microbatches: ClassVar[bool] = True

    mode: Literal["attribution"] = "attribution"
    """Gradient mode; --grad.mode MODE --help lists the fields of another one."""
    validation_batch: Count | None = None
    """Test examples that each step is scored with; by default a sixteenth of the batch."""
    validation_examples: Count = 256
    """Test examples to draw them from, which are constants of the step."""
    second_order: bool = False
    """Add the second order, which takes a product with the Hessian of the test loss."""

    @override
    def check(self, config: "Config") -> None:
        super().check(config)
        if config.data.crops > 1:
            raise UserError(
                f"data.crops: {config.data.crops}, but grad.mode attribution scores with test "
                "images of one crop; give data.crops 1"
            )

    @override
    def build_for(
        self,
        config: "Config",
        optimizer: "optax.GradientTransformation",
        privacy: Any,
        dataset: "Dataset",
        schedule: "optax.Schedule",
    ) -> Built:
        from fnet.attribution import InRun  # imports JAX
        from train.data import num_examples
        from train.data.masks import spread

        chosen = np.asarray(spread(num_examples(dataset.test), self.validation_examples))
        validation = dataset.test_batch({name: a[chosen] for name, a in dataset.test.items()})
        size = self.validation_batch or max(config.data.batch_size // 16, 1)
        mode = InRun(
            validation,
            num_examples(dataset.train),
            schedule,
            validation_batch=min(size, len(chosen)),
            second_order=self.second_order,
        )
        return mode, mode.wrap_optimizer(optimizer)
