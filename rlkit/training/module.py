"""Run the learner in a Lightning module, `RLModule`. Lightning adds devices, ranks, precision,
checkpoints and callbacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch

from rlkit.distributed import ranks
from rlkit.episodes.samplers import measure_sampler
from rlkit.functional import mix
from rlkit.system import rng
from rlkit.system.device import precision
from rlkit.system.sharding import find_sharded_modules
from rlkit.training.ahead.flight import Flight, StepGroups, pack_rollouts
from rlkit.training.ahead.source import GroupSource, get_next_groups
from rlkit.training.experiment import Experiment
from rlkit.training.learner import Learner
from rlkit.training.metrics import convert_to_number
from rlkit.training.resume import select_trained_state
from rlkit.training.reuse import Group, unpack_kept, with_reused
from rlkit.training.update.optimizers import make_optimizers
from rlkit.training.update.probe import probe_memory
from rlkit.training.update.record import Host
from rlkit.types import Policy, Task


class Steps:
    """Iterate over the RL steps that remain. The iterable has a length and a state, so that
    Lightning neither prefetches nor repeats steps. The state is the module's count of RL steps.
    Dropped steps do not count."""

    def __init__(self, module: RLModule):
        self.module = module

    def __len__(self) -> int:
        return self.module.total_steps

    def __iter__(self) -> Iterator[int]:
        while self.module.rl_step < len(self):
            yield self.module.rl_step

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.module.rl_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the module itself restores its count from the checkpoint."""


def _forward_to_learner(name: str) -> Any:
    """Make a property that reads and writes an attribute of the learner, for callbacks."""
    return property(
        lambda self: getattr(self.learner, name),
        lambda self, value: setattr(self.learner, name, value),
    )


class RLModule(L.LightningModule):
    """A Lightning module that takes one RL step in each training_step.

    `flight` holds the position in the prompts and the groups in flight (requested, but not yet
    trained on). `kept` holds the groups to learn from again. The module also owns the random
    generators and the length of the run. All other state belongs to the learner. `source` samples
    the groups (`rlkit.training.ahead.modes.group_source`).

    After each step `metrics` holds the metrics to log, `rollouts` the scored episodes, and
    `trained` the rollouts in `batch`. `mismatch_bound` is `Agreement.bound` of the check before the
    first step. In half precision this bound is added to the metrics of every step.
    """

    rl_step, x, experiment, metrics, rollouts = map(
        _forward_to_learner, ("rl_step", "x", "experiment", "metrics", "rollouts")
    )
    trained, batch, tokens, clock = map(
        _forward_to_learner, ("trained", "batch", "tokens", "clock")
    )

    def __init__(
        self,
        experiment: Experiment,
        policy: Policy,
        tasks: Sequence[Task],
        *,
        source: GroupSource,
        exact: bool = False,
        mismatch_bound: float | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # a frozen base is not in the checkpoint
        host = Host(
            backward=lambda loss: self.manual_backward(loss), optimizer_step=self.step_in_lightning
        )
        self.learner = Learner(experiment, policy, exact=exact, host=host)
        self.policy = policy
        self.tasks = tasks
        self.source = source
        # models are attributes of the module, so that Lightning moves and saves them
        self.model = policy.model
        self.critic = self.learner.critic
        self.constants: dict[str, float] = {}
        if mismatch_bound is not None:
            self.constants["mismatch/logp_abs_bound"] = mismatch_bound
        self.flight = Flight()
        self.started = time.perf_counter()
        self.kept: tuple[Group, ...] = ()  # groups to learn from again
        # whether the step can be dropped without loss, because no update has begun
        self.droppable = False
        # the generators' state at the start of the current step
        self.before: dict[str, Any] | None = None
        # the generators' states from a checkpoint, one per rank, to be restored at the start
        self.generators: list[dict[str, Any]] = []
        self.provenance: dict[str, Any] = {}  # config, versions and git state, for the checkpoint
        # name → the values logged by callbacks since the last row
        self.logged: dict[str, list[float]] = {}

    def training_step(self, index: int, _: int) -> None:
        """Take one RL step: get the step's groups, replace some of these groups by kept groups from
        earlier steps, and let the learner train on them."""
        groups, figures = self.take_groups()
        x = self.x
        reused = with_reused(x.reuse, self.kept, groups.trained, step=self.rl_step, seed=x.seed)
        self.kept = reused.kept
        self.learner.step(groups.sampled, reused.trained)
        self.metrics |= figures | measure_sampler(groups.after.sampler) | reused.metrics
        self.metrics |= self.constants
        self.trainer.should_stop = ranks.any_rank(
            self.rl_step >= self.total_steps or self.is_out_of_time()
        )
        self.clock.end()

    def take_groups(self) -> tuple[StepGroups, dict[str, float]]:
        """Return the groups of the next step, and metrics about these groups. Until this method
        returns, `drop_step` can undo the step, because only the random generators have changed."""
        learner = self.learner
        learner.begin()
        self.before = rng.state()
        self.droppable = True
        groups, flight, figures = get_next_groups(
            self.source,
            self.flight,
            learner.experiment,
            self.policy,
            progress=learner.progress,
            clock=learner.clock,
        )
        self.droppable = False
        self.before = None
        self.flight = flight
        return groups, figures

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Log a metric of your own: `module.log("mine/share", 0.5)` in any hook of a callback.

        All values logged under this name since the last row are averaged, over all ranks. The mean
        goes into the step's row in metrics.jsonl, in metrics.csv and in every logger. Lightning's
        other arguments have no effect.

        Raises: PartError if the value is not one number.
        """
        self.logged.setdefault(name, []).append(convert_to_number(name, value))

    def drop_step(self) -> None:
        """Undo the current step by restoring the random generators. Sampling and scoring change
        nothing else."""
        if self.before is not None:
            rng.restore(self.before)
            self.before = None

    def step_in_lightning(self, optimizer: torch.optim.Optimizer) -> None:
        """Step one of the learner's optimizers through Lightning."""
        known: Any = self.optimizers()
        for own in known if isinstance(known, list) else [known]:
            if own.optimizer is optimizer:
                own.step()

    @property
    def total_steps(self) -> int:
        """Return the number of RL steps in the whole run."""
        return self.experiment.trainer.steps

    def is_out_of_time(self) -> bool:
        """Return whether trainer.max_time has passed since this process began to train."""
        limit = self.experiment.trainer.max_time
        return limit is not None and time.perf_counter() - self.started > 60 * limit

    # ------------------------------------------------------------------------------------ Lightning

    def train_dataloader(self) -> Steps:
        return Steps(self)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        learner = self.learner
        # the optimizers are made again, because the weights may be sharded by now
        learner.optimizers.made = make_optimizers(learner.experiment, self.model, self.critic)
        return learner.optimizers.made

    def configure_model(self) -> None:
        if (
            self.experiment.trainer.strategy == "fsdp"
            and ranks.size() > 1
            and not find_sharded_modules(self.model)
        ):
            self.learner.optimizers.made.clear()  # these optimizers hold the unsharded weights
            device = self.trainer.strategy.root_device  # self.device is still the CPU
            mixed = precision(self.experiment, device) == "bf16-mixed"
            self.learner.kept.shard(self.device_mesh["data_parallel"], mixed=mixed)  # type: ignore[index]

    def trained_state(self) -> dict[str, Any]:
        """Return the module's state dict without a frozen base."""
        return select_trained_state(self.state_dict(), self.model)

    def on_train_start(self) -> None:
        if self.device.type == "cuda" and ranks.size() == 1:
            with self.trainer.strategy.precision_plugin.forward_context():
                probe_memory(self.learner.record(), self.tasks)
        self.droppable = False
        # A finished run may be resumed only to write its last files. Without this line the loop
        # would wait forever.
        if self.rl_step >= self.total_steps:
            self.trainer.should_stop = True
        # the generators are restored only now, because the setup uses random numbers
        if ranks.rank() < len(self.generators):
            rng.restore(self.generators[ranks.rank()])
        elif ranks.rank():  # the checkpoint has no such rank, or there is no checkpoint
            rng.seed(mix(self.experiment.seed, self.rl_step, ranks.rank()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fill(checkpoint, ranks.gather(rng.state))

    def fill(self, checkpoint: dict[str, Any], generators: list[dict[str, Any]]) -> None:
        """Complete a checkpoint: add all state that Lightning does not know, and remove the frozen
        base.

        Args:
          checkpoint: the checkpoint made by Lightning; it is changed in place.
          generators: the generators' states, one per rank, in order.
        """
        checkpoint["state_dict"] = select_trained_state(checkpoint["state_dict"], self.model)
        own = {"generators": generators, "kept": [pack_rollouts(group) for group in self.kept]}
        checkpoint["rlkit"] = self.learner.save() | self.source.state(self.flight) | own
        checkpoint["run"] = self.provenance

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlkit"]
        self.generators = state["generators"]
        self.learner.load(checkpoint)
        self.kept = unpack_kept(state["kept"], self.tasks)
        self.flight = self.source.restore(state, self.policy, self.learner.progress)
