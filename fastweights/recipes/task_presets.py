"""Settings of `fastweights compare --task NAME`: what to train on, what to measure, which model, which learning rates and seeds.

The sources' own settings, with two changes that docs/tasks.md argues for: examples are fresh at every step instead of a fixed set that is
memorised, and every mixer gets a grid of learning rates and several seeds instead of one of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastweights.tasks import MQAR, MQARKLA, SNIAH, Palindrome, Stack, StateTracking, Task
from fastweights.train.presets import ModelSize


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """One comparison: every mixer is trained once for each learning rate and seed.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    train: tuple[tuple[Task, float], ...]
    """The training mixture: tasks, and the share of the steps that each takes. A step draws one batch of one task."""
    evaluate: tuple[Task, ...]
    """What is measured in the end: the mixture, and longer or fuller sequences than were trained on."""
    model: ModelSize
    """The shape of the model, the same for every mixer; the vocabulary is the tasks'."""
    learning_rates: tuple[float, ...]
    """The grid. The report shows the best of it by accuracy in training, never by what is measured in the end."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of weights and training examples. Mixers share the examples of a seed."""
    steps: int = 10_000
    """Optimizer steps, at most."""
    batch_size: int = 32
    """Fresh sequences a step."""
    schedule: str = "constant"
    """After the warm-up: ``constant``, or ``cosine`` to zero at the last step."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """AdamW's, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    window: int = 200
    """Steps over which accuracy in training is averaged. Examples are fresh, so it is an unbiased measure of what the model knew then."""
    stop_at: float | None = 0.999
    """Stop when a window's accuracy reaches this share of the ceiling on every task of the mixture. There is no other way to stop early: a
    plateau, however long, never ends a run, because recall is often learned after one. None: never stop early."""
    samples: int = 1000
    """Sequences a measurement in the end."""
    precision: str = "fp32"
    """Of the matrix products: ``fp32``, ``tf32`` (on a GPU) or ``bf16``."""

    def __post_init__(self) -> None:
        for name in ("train", "evaluate", "learning_rates", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; at least one is needed")
        for name in ("steps", "batch_size", "window", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for rate in (*self.learning_rates, *(share for _, share in self.train)):
            if not rate > 0:
                raise ValueError(f"a learning rate or share is {rate}; it must be positive")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule is {self.schedule!r}; it must be constant or cosine")
        if self.precision not in ("fp32", "tf32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}; it must be fp32, tf32 or bf16")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup}; it is a share of the steps, 0 to 1")
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise ValueError(f"stop_at is {self.stop_at}; it is a share of the ceiling, above 0 and up to 1, or None")

    @property
    def vocab_size(self) -> int:
        """Tokens of the model: enough for every task in the settings."""
        return max(task.vocab_size for task in (*(task for task, _ in self.train), *self.evaluate))


def _alone(task: Task) -> tuple[tuple[Task, float], ...]:
    return ((task, 1.0),)


def _zoology(width: int) -> TaskSettings:
    """Zoology's test mixture and training mixture; 22,500 steps of 256 are its 32 epochs of 180,000 examples. Its blocks have no MLP."""

    def mixture(*keys: tuple[int, int]) -> tuple[Task, ...]:
        return tuple(MQAR(length=length, pairs=pairs) for length, pairs in keys)

    trained = mixture((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))
    return TaskSettings(
        train=tuple(zip(trained, (100.0, 20.0, 20.0, 20.0, 20.0), strict=True)),
        evaluate=mixture((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256)),
        model=ModelSize(hidden_size=width, num_hidden_layers=2, num_heads=2, intermediate_size=0),
        learning_rates=(1e-3, 10**-2.5, 1e-2, 10**-1.5),
        steps=22_500,
        batch_size=256,
        schedule="cosine",
        warmup=0.1,
        stop_at=0.99,
    )


_KLA_MQAR = ModelSize(hidden_size=256, num_hidden_layers=2, num_heads=4, intermediate_size=1024, expand_k=0.75, expand_v=1.5)
_KLA_COPY = replace(_KLA_MQAR, num_heads=2)
_KLA_RATES = (3e-4, 1e-3, 3e-3)
"""The KLA paper used 1e-3 for every model."""


def _kla(task: Task, *, model: ModelSize, lengths: tuple[int, ...], steps: int) -> TaskSettings:
    return TaskSettings(
        train=_alone(task),
        evaluate=tuple(replace(task, length=length) for length in lengths),
        model=model,
        learning_rates=_KLA_RATES,
        steps=steps,
    )


def _states(group: str, moves: str = "all") -> TaskSettings:
    """After Grazzi et al. (arXiv 2411.12537): trained short, measured far beyond. Very short sequences in the mixture let the moves be
    learned one by one."""
    task = StateTracking(group=group, moves=moves)
    return TaskSettings(
        train=tuple((replace(task, length=length), 1.0) for length in (5, 9, 17, 33)),
        evaluate=tuple(replace(task, length=length) for length in (33, 65, 129, 257, 513)),
        model=ModelSize(hidden_size=128, num_hidden_layers=2, num_heads=4, intermediate_size=512),
        learning_rates=(5e-4, 1e-3, 3e-3),
        batch_size=256,
        stop_at=0.9999,
    )


TASK_PRESETS: dict[str, TaskSettings] = {
    "mqar": TaskSettings(
        train=_alone(MQAR(length=64, pairs=4, vocab_size=256)),
        evaluate=tuple(MQAR(length=length, pairs=4, vocab_size=256) for length in (64, 128, 256)),
        model=ModelSize(hidden_size=64, num_hidden_layers=2, num_heads=2, intermediate_size=0),
        learning_rates=(2e-3,),
        seeds=(0,),
        steps=2000,
        schedule="cosine",
        warmup=0.1,
        window=50,
        stop_at=0.998,
    ),
    "mqar-zoology-64": _zoology(64),
    "mqar-zoology-128": _zoology(128),
    "mqar-zoology-256": _zoology(256),
    "mqar-kla": _kla(MQARKLA(length=256), model=_KLA_MQAR, lengths=(256, 512, 1024, 2048), steps=10_000),
    "one-pair-kla": _kla(MQARKLA(length=1024, pairs=1), model=_KLA_MQAR, lengths=(1024, 2048, 4096, 8192), steps=10_000),
    "palindrome-kla": _kla(Palindrome(length=1024), model=_KLA_COPY, lengths=(256, 512, 1024, 2048), steps=20_000),
    "stack-kla": _kla(Stack(length=1024), model=_KLA_COPY, lengths=(256, 512, 1024, 2048), steps=20_000),
    "parity": _states("parity"),
    "s3": _states("s3"),
    "s5": _states("s5"),
    "s3-swaps": _states("s3", "swaps"),
    "s5-swaps": _states("s5", "swaps"),
    "needle-bytes": TaskSettings(
        train=_alone(SNIAH(length=768, new_tokens=16)),
        evaluate=tuple(SNIAH(length=length, new_tokens=16) for length in (768, 1024, 2048, 4096)),
        model=ModelSize(hidden_size=256, num_hidden_layers=4, num_heads=4, intermediate_size=768),
        learning_rates=(1e-3, 3e-3),
        samples=200,
    ),
}
"""``mqar`` takes minutes on a laptop; ``mqar-zoology-WIDTH`` is the field's benchmark, ``…-kla`` are the KLA paper's tasks; ``parity``,
``s3`` and ``s5`` follow a state; ``needle-bytes`` learns RULER's first needle on bytes."""
