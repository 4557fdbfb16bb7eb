"""Define the learner, one object with policy, critic, references, optimizers and all other state
with an effect on later steps. The training loop is in the docstring of `Learner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlkit.distributed import ranks
from rlkit.errors import refuse_problems
from rlkit.functional import mix
from rlkit.models.head import split_model
from rlkit.models.packing import find_packed_context
from rlkit.rewards import Moments, update_moments
from rlkit.system import rng
from rlkit.system.shared_state import guard_state
from rlkit.training import schedules
from rlkit.training.experiment import Experiment, settle_correction
from rlkit.training.metrics import Clock
from rlkit.training.reference_states import ReferenceStates
from rlkit.training.resume import (
    Fields,
    describe_arithmetic,
    go_on_as_before,
    select_trained_state,
)
from rlkit.training.update import drift
from rlkit.training.update.claims import Claims
from rlkit.training.update.micro_batches import MicroBatches
from rlkit.training.update.optimizers import Optimizers, make_first_critic, make_optimizers
from rlkit.training.update.record import Host, Update
from rlkit.training.update.step import step_metrics, update_models
from rlkit.types import Policy, Rollout, Weighted


class Learner:
    """Estimate advantages, and update policy and critic. Each call of `step` is one RL step.

        import rlkit

        x = rlkit.experiment("trainer.steps=2", "batch.prompts=4")
        tasks = rlkit.load_tasks(x)
        policy, device, exact = rlkit.ready(x, tasks)
        learner, stream = rlkit.Learner(x, policy, exact=exact), rlkit.StreamState()
        for step in range(x.trainer.steps):
            with rlkit.autocast(x, device, updates=True):
                now = learner.begin()  # the experiment of this step: phase and scheduled numbers
                sampled, trained, stream = rlkit.experience(
                    now, policy, tasks.train, stream, step=step
                )
                metrics = learner.step(sampled, trained)

    This loop gives the same weights as `rlkit train`, bit for bit. The rollouts may come from
    anywhere, but they must be scored. Two possible sources are `rlkit.collect` with `rlkit.score`,
    and an engine that samples ahead of training.

    The learner's state is explicit: the weights and the optimizers, `rl_step`, `progress` (phase
    and controllers), `moments` (of the rewards), `kept` (references and teachers) and `micro`
    (micro-batches). After a step, `metrics` holds the metrics of the step, `rollouts` the scored
    episodes, and `trained` the rollouts in `batch`.

    Args:
      experiment: the experiment of the whole run.
      policy: the policy to train, in place and in evaluation mode.
      exact: whether the check before the first step found that the engine gives exactly the
        trainer's log-probs. This decides which off-policy correction algorithm/correction=auto
        stands for.
      host: hooks to run forward, backward and optimizer step. To compute in another precision than
        the weights', the caller writes `with autocast(x, device, updates=True)`.
      critic: used in place of the experiment's critic.
      optimizers: used in place of the experiment's: one for the policy and, if there is a critic,
        one for the critic.
    """

    def __init__(
        self,
        experiment: Experiment,
        policy: Policy,
        *,
        exact: bool = False,
        host: Host = Host(),  # noqa: B008  (immutable)
        critic: nn.Module | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ):
        self.policy = policy
        self.model = policy.model
        self.host = host
        self.settle(experiment, exact=exact)
        self.progress = schedules.start(self.experiment)
        self.x = schedules.resolve_schedules(self.experiment, self.progress)
        self.critic = make_first_critic(experiment, self.model) if critic is None else critic
        of_critic = {} if self.critic is None else {"critic": self.critic}
        self.nets = nn.ModuleDict({"model": self.model} | of_critic)
        self.optimizers = Optimizers(
            optimizers or make_optimizers(experiment, self.model, self.critic)
        )
        context = find_packed_context(split_model(self.model)[0].config)
        self.micro = MicroBatches(self.x.trainer.micro_batch_tokens, packed_context=context)
        self.kept = ReferenceStates(self.experiment, self.model)
        self.enter_phase()
        self.rl_step = 0
        self.tokens = 0
        self.begun = -1
        self.moments = Moments()  # of all rewards so far
        # a few rollouts of the first step, with their log-probs at the start
        self.start: drift.Few | None = None
        self.claims = Claims()  # the engine's claims about its versions of the weights
        # version (RL steps done) → steps of the policy's optimizer until then; latest versions only
        self.updates = {0: 0}
        self.metrics: dict[str, Any] = {}
        self.rollouts: list[Rollout] = []
        self.trained: list[Rollout] = []
        self.batch: Weighted | None = None
        self.clock = Clock()  # the clock of the present step

    def settle(self, experiment: Experiment, *, exact: bool) -> None:
        """Use this experiment from the next step on. Replace algorithm/correction=auto in every
        phase by the correction for the run, which depends on `exact` (see `settle_correction`)."""
        self.configured = experiment
        self.exact = exact
        self.experiment = settle_correction(experiment, exact=exact)
        # name of a phase → its whole experiment; the only name is "" if there are no phases
        self.phases = schedules.list_phases(self.experiment)

    def begin(self) -> Experiment:
        """Return the experiment of the next step. Call this method before the step's rollouts are
        sampled, because sampling uses this experiment too. The first call starts the clock of the
        step."""
        if self.begun < self.rl_step:
            self.advance()
            self.begun = self.rl_step
            self.clock = self.clock.make_following(evaluated=self.metrics.get("perf/eval_s", 0.0))
            self.x = schedules.resolve_schedules(self.experiment, self.progress)
        return self.x

    def step(
        self, rollouts: Sequence[Rollout], trained: Sequence[Rollout] | None = None
    ) -> dict[str, Any]:
        """Take one RL step: rewards → advantages → updates → reference. Return the metrics of the
        step.

        Args:
          rollouts: all scored episodes of the step, group by group.
          trained: the rollouts to train on; None: all.
        Raises: NonFinite, OutOfMemory.
        """
        x = self.begin()
        self.rollouts, self.trained = list(rollouts), list(rollouts if trained is None else trained)
        unscored = [r.reward is None and not r.rewards for r in self.trained]
        if x.algorithm.reward_coef and unscored and all(unscored):
            raise ValueError("Learner.step: no rollout has a score; score them by rlkit.score")
        self.moments = update_moments(self.moments, self.rollouts)
        u = self.record()
        parts = x.algorithm, x.kl, x.reference
        with self.clock.part("update"), rng.seed_block(u.seed), guard_state(*parts):
            claims = self.claims.check(u)
            done = update_models(u, self.optimizers, self.rollouts, self.start)
            self.batch, terms, self.start = done.batch, done.terms, done.start
            kl = terms.mean("kl")
            terms.reference = self.kept.move(x.reference, step=self.rl_step + 1, kl=kl)
        self.updates[self.rl_step + 1] = self.updates[self.rl_step] + len(terms.norms["policy"])
        self.updates.pop(self.rl_step - x.staleness - 1, None)
        self.rl_step += 1
        self.tokens += int(self.batch.attention_mask.sum())
        metrics = step_metrics(u, done, self.rollouts, self.updates, self.tokens)
        metrics |= claims | schedules.measure_schedules(self.experiment, self.progress)
        self.metrics = ranks.broadcast(lambda: metrics)  # seconds differ between ranks
        self.clock.end()
        return self.metrics

    def record(self) -> Update:
        """Return the record of the current step. The passes and updates of the step read it."""
        x = self.x
        self.micro.tokens = x.trainer.micro_batch_tokens
        critic = x.algorithm.critic
        return Update(
            x=x,
            policy=self.policy,
            critic=self.critic if critic.active else None,
            kept=self.kept,
            micro=self.micro,
            host=self.host,
            clock=self.clock,
            step=self.rl_step,
            seed=mix(x.seed, self.rl_step),
            warming_up=critic.active and self.rl_step - self.progress.since < critic.warmup,
            trained=self.trained,
            moments=self.moments if x.reward.normalize else None,
        )

    def advance(self) -> str:
        """Apply a step's metrics once: update the controllers, and begin the next phase if the
        present phase is over. If a phase begins, return a line about this phase.

        `begin` and `save` call this method. Before this call, callbacks may add metrics, as
        evaluations do.
        """
        before = self.progress
        if before.step == self.rl_step:
            return ""
        refuse_problems(schedules.find_unmeasured(self.experiment, before, self.metrics))
        self.progress = schedules.advance(self.experiment, before, self.metrics)
        if self.progress.phase == before.phase:
            return ""
        self.x = schedules.resolve_schedules(self.experiment, self.progress)
        return schedules.describe_transition(
            self.experiment, before, self.progress, self.enter_phase()
        )

    def enter_phase(self) -> list[str]:
        """Begin the phase given by `progress`. If the phase has its own reference policy, or if its
        config asks to reset the reference, the reference starts from the present policy. If its
        config asks to reset the optimizer, the moments of all optimizers are forgotten. Return the
        names of the things that were reset."""
        reset = ["reference"] if self.kept.enter(self.progress, self.x.reference) else []
        if "optimizer" in schedules.find_resets(self.experiment, self.progress):
            self.optimizers.forget()
            reset.append("optimizer moments")
        return reset

    # ------------------------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Any]:
        """Return all state with an effect on later steps, in the format of a checkpoint of `rlkit
        train`. The state does not contain the position in the prompts and the random generators."""
        return {
            "state_dict": select_trained_state(self.nets.state_dict(), self.model),
            "optimizer_states": [optimizer.state_dict() for optimizer in self.optimizers.made],
            "rlkit": self.save(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, or a checkpoint of `rlkit train`. A learner of the same
        experiment then continues bit for bit."""
        self.load(state)
        self.nets.load_state_dict(state["state_dict"], strict=False)
        for own, saved in zip(self.optimizers.made, state["optimizer_states"], strict=True):
            own.load_state_dict(saved)

    def save(self) -> dict[str, Any]:
        """Return the content of a checkpoint except weights and optimizers, as plain types and
        tensors. If the weights are sharded, all ranks must call it."""
        self.advance()
        return {
            "rl_step": self.rl_step,
            "progress": self.progress._asdict(),
            "tokens": self.tokens,
            "updates": self.updates,
            "exact": self.exact,
            "start": drift.pack_few(self.start),
            "moments": list(self.moments),
            **self.kept.save(),
            "nonfinite": dict(self.optimizers.nonfinite),
            "halvings": self.micro.halvings,
            "micro_batch_tokens": self.experiment.trainer.micro_batch_tokens,
            **describe_arithmetic(self.experiment, self.model),
        }

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the state that `save` returned. Call this before loading the weights, because
        references that began with the run are made from the weights of model.path. Raise DataError
        if a field is missing, as in a checkpoint of an earlier commit."""
        checkpoint = {**checkpoint, "rlkit": (state := Fields(checkpoint["rlkit"]))}
        self.rl_step, self.tokens, self.begun = state["rl_step"], state["tokens"], -1
        self.moments, self.updates = Moments(*state["moments"]), dict(state["updates"])
        self.optimizers.nonfinite = dict(state["nonfinite"])
        # the user may have changed the setting since, for example because memory ran out
        if state["micro_batch_tokens"] == self.experiment.trainer.micro_batch_tokens:
            self.micro.halvings = state["halvings"]
        self.progress = schedules.Progress(**state["progress"])
        self.start = drift.unpack_few(state["start"])
        self.claims = Claims()  # the weights of earlier versions are gone
        go_on_as_before(self.configured, self.policy, self.critic, checkpoint, exact=self.exact)
        self.settle(self.configured, exact=state["exact"])
        self.x = schedules.resolve_schedules(self.experiment, self.progress)
        self.enter_phase()
        self.kept.load(state)
