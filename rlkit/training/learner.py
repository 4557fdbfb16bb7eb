"""The learner: policy, critic, references, optimizers and all that decides the steps to come, as
one value. There is one training loop.

    learner, stream = Learner(experiment, policy), StreamState()
    for _ in range(steps):
        x = learner.begin()      # the experiment of this step: its phase, and scheduled numbers as
                                 they are now
        sampled, trained, stream = experience(x, policy, tasks, stream, step=learner.rl_step)
        metrics = learner.step(sampled, trained)

The rollouts may come from anywhere, if they are scored: from a loop of one's own over `collect` and
`score`, or from an engine that runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.algorithm import estimate_advantages, filter_rollouts, token_scale
from rlkit.distributed import ranks
from rlkit.episodes import assemble, summarize
from rlkit.errors import ConfigError
from rlkit.functional import mix
from rlkit.models.critic import make_critic
from rlkit.models.fused import kernel_of
from rlkit.models.head import trunk_and_head
from rlkit.rewards import Moments, normalise, update_moments
from rlkit.system import rng
from rlkit.system.device import precision
from rlkit.system.shared_state import guard_state
from rlkit.training import drift, schedules, streams
from rlkit.training.experiment import Experiment, correction_in_words, settle_correction
from rlkit.training.kernels import keep_kernels, kernels_in_use
from rlkit.training.memory import retried
from rlkit.training.metrics import (
    Clock,
    UpdateTerms,
    performance,
    refill_metrics,
    staleness_metrics,
    update_metrics,
)
from rlkit.training.optimizers import make_optimizer
from rlkit.training.references import is_start, moved, shard_state
from rlkit.training.update import (
    known_old,
    moved_since,
    one_update,
    step_minibatches,
    updates_once,
    with_logprobs,
    with_old,
)
from rlkit.types import Batch, Policy, Rollout


class Host(NamedTuple):
    """What a learner leaves to the process that it lives in. The defaults are plain torch, and the
    collectives of a process group."""

    forward: Callable[..., Any] = (
        ranks.in_forward
    )  # (model, function, *arguments, **settings) → function(model, …), as its forward pass
    backward: Callable[[Tensor], Any] = Tensor.backward
    optimizer_step: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step()
    all_reduce: Callable[[Iterable[Tensor | None]], None] = (
        ranks.all_reduce_sum
    )  # every tensor becomes its sum over the processes, in place


class Learner:
    """Estimates advantages and updates policy and critic, one RL step per `step`.

    Everything that decides the future is explicit: the weights and the optimizers, `rl_step`,
    `progress` (phase and controllers), `moments` (of the rewards), `references`, `nonfinite` and
    `halvings`. After a step `metrics` holds its row, `rollouts` the scored episodes and `trained`
    those of them that `batch` was made of.

    Args:
      experiment: the whole run. policy: trained in place, in evaluation mode.
      exact: whether the engine was found to give the trainer's log-probs; decides what
        algorithm/correction=auto means.
      host: who computes. A precision other than that of the weights is the caller's: `with
        autocast(x, device, updates=True)`.
      optimizers: of the policy and, if there is one, of the critic, in place of those that the
        experiment makes.
    """

    def __init__(
        self,
        experiment: Experiment,
        policy: Policy,
        *,
        exact: bool = False,
        host: Host = Host(),  # noqa: B008  (immutable)
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ):
        self.configured = experiment
        self.policy = policy
        self.model = policy.model
        self.host = host
        self.lay_out: Callable[[Any], None] | None = (
            None  # makes shards of a model, where the policy lies in shards
        )
        self.settle(exact)
        self.progress = schedules.start(self.experiment)
        self.x = schedules.at(self.experiment, self.progress)
        self.critic = self.make_critic()
        self.nets = torch.nn.ModuleDict(
            {"model": self.model} | ({} if self.critic is None else {"critic": self.critic})
        )
        self.optimizers = list(optimizers) or self.make_optimizers()
        self.rl_step = 0
        self.tokens = 0
        self.begun = -1
        self.moments = Moments()  # of all rewards so far
        self.references: dict[str, Any] = {}  # owner ("" for the run's own, else a phase) → state
        if any(x.needs_reference for name, x in self.phases.items() if not self.owner(name)):
            self.references[""] = self.experiment.reference.init(self.model, step=0)
        teachers = self.experiment.teacher.models if self.experiment.needs_teacher else {}
        self.teachers: dict[str, Any] = {
            part: model.init(self.model, step=0) for part, model in teachers.items()
        }  # part → state
        self.enter_phase()
        self.start: Batch | None = (
            # a few rollouts of the first step, with the log-probs that the start gave them (drift)
            None
        )
        self.nonfinite: dict[
            int, int
        ] = {}  # optimiser → its updates in a row that were skipped since something was not finite
        self.halvings = 0  # of the micro-batches, since memory ran out
        self.updates = {
            0: 0
        }  # version (RL steps done) → steps of the policy's optimiser until then, of the last ones
        self.in_flight: dict[
            str, float
        ] = {}  # of the groups that are sampled for later steps: metrics
        self.metrics: dict[str, Any] = {}
        self.rollouts: list[Rollout] = []
        self.trained: list[Rollout] = []
        self.batch: Batch | None = None
        self.minibatch: Batch | None = None  # of the update under way
        self.clock = Clock()  # of the step under way

    # ---------------------------------------------------------------------------------- one RL step

    def begin(self) -> Experiment:
        """The experiment of the step to come, with which its rollouts are sampled. The clock of the
        step starts with the first call."""
        if self.begun < self.rl_step:
            self.advance()
            self.begun = self.rl_step
            self.clock = self.clock.following(evaluated=self.metrics.get("perf/eval_s", 0.0))
            self.x = schedules.at(self.experiment, self.progress)
        return self.x

    def step(
        self, rollouts: Sequence[Rollout], trained: Sequence[Rollout] | None = None
    ) -> dict[str, Any]:
        """Rewards → advantages → updates → reference; the metrics of the step.

        Args:
          rollouts: all scored episodes of the step, group by group.
          trained: those of them to train on; None is all.
        Raises: NonFinite, OutOfMemory.
        """
        x = self.begin()
        self.rollouts, self.trained = list(rollouts), list(rollouts if trained is None else trained)
        self.moments = update_moments(self.moments, self.trained)
        if x.reward.normalize:
            self.trained = normalise(self.trained, self.moments)
        functions = x.algorithm, x.kl, x.reference
        # The shuffle is of the whole batch: alike on all ranks.
        with self.clock.part("update"), rng.drawn_from(self.shuffle_seed), guard_state(*functions):
            self.batch = batch = self.prepared(self.trained)
            terms = UpdateTerms()
            measured = drift.few(batch) if x.algorithm.episodes is None else None
            if not updates_once(self, batch):
                measured = with_old(self, measured)
            if self.rl_step == 0 and self.follows_drift():
                self.start = with_old(self, drift.few(self.assembled(self.rollouts)))
            for minibatch in step_minibatches(self, batch, terms):
                self.minibatch = minibatch
                if not retried(self, minibatch, partial(one_update, self, minibatch, terms), terms):
                    break
            terms.gather()
            self.minibatch = None
            start = (
                None
                if x.kl.active and self.reference_key == "" and is_start(x.reference)
                else self.start
            )  # else kl/ref says it
            if measured is not None and measured.logprobs_old is None:
                measured = drift.before_update(measured, terms.tokens)
            drifted = moved_since(self, {"kl/step": measured, "kl/start": start})
            ranks.reshard(self.model)
            self.update_reference(terms)
        before = self.updates.get(self.rl_step, 0)
        oldest = self.rl_step - x.staleness
        self.updates = {v: n for v, n in self.updates.items() if v >= oldest} | {
            self.rl_step + 1: before + len(terms.norms["policy"])
        }
        self.rl_step, self.tokens = self.rl_step + 1, self.tokens + int(batch.attention_mask.sum())
        metrics = self.measured(batch, terms) | drifted
        self.metrics = ranks.broadcast(lambda: metrics)  # its clock; everything else is equal
        self.clock.end()
        return self.metrics

    def assembled(self, rollouts: Sequence[Rollout]) -> Batch:
        """The rollouts as tensors beside the policy."""
        return assemble(rollouts, pad_token_id=self.policy.pad_token_id, device=self.device)

    def prepared(self, rollouts: Sequence[Rollout]) -> Batch:
        """The batch that a step updates with: rollouts filtered, old and reference scores,
        advantages, weights of tokens."""
        x = self.x
        batch = streams.of_reward(
            filter_rollouts(self.assembled(rollouts), x.algorithm),
            rollouts,
            x.algorithm.streams.get("reward"),
        )
        if any(stream.mask == "observations" for stream in streams.active(self).values()):
            batch = batch._replace(
                observed_mask=streams.observed(batch, rollouts, self.policy.renderer)
            )
        batch = estimate_advantages(
            retried(self, batch, partial(with_logprobs, self, batch)), x.algorithm, x.kl
        )
        return known_old(self, token_scale(batch, x.algorithm))

    def measured(self, batch: Batch, terms: UpdateTerms) -> dict[str, Any]:
        """The metrics of a step. schedule/PATH: every scheduled number as it was in it;
        schedule/phase: which phase, from 0."""
        metrics = summarize(self.rollouts) | update_metrics(batch, terms, self.x)
        metrics |= performance(batch, terms, self.clock, tokens=self.tokens, device=self.device)
        metrics |= refill_metrics(self.rollouts, self.trained)
        if self.x.asynchrony.mode != "none" or self.x.reuse.active:
            metrics |= staleness_metrics(batch, terms, step=self.rl_step - 1, updates=self.updates)
            metrics |= {f"staleness/{name}": value for name, value in self.in_flight.items()}
        metrics |= {
            f"schedule/{path}": value
            for path, value in schedules.values(self.experiment, self.progress).items()
        }
        return metrics | ({"schedule/phase": self.progress.phase} if len(self.phases) > 1 else {})

    def follows_drift(self) -> bool:
        """Whether any step may ask how far the policy is from its start, and the first one is
        sampled from it."""
        return self.x.algorithm.episodes is None and not all(
            x.kl.active and not self.owner(name) and is_start(x.reference)
            for name, x in self.phases.items()
        )

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return next(self.model.parameters()).device

    @property
    def temperature(self) -> float:
        """What the trained log-probs are divided by: the sampler's temperature, 1 for a greedy
        sampler."""
        return self.x.generation.temperature or 1.0

    @property
    def micro_batch_tokens(self) -> int:
        """trainer.micro_batch_tokens, halved as often as memory ran out."""
        return max(1, self.x.trainer.micro_batch_tokens >> self.halvings)

    @property
    def shuffle_seed(self) -> int:
        """What this step's minibatches are drawn from, and all else that is random in its
        update."""
        return mix(self.x.seed, self.rl_step)

    def warming_up(self) -> bool:
        """Whether the critic learns alone, in the first steps of its phase."""
        critic = self.x.algorithm.critic
        return critic.active and self.rl_step - self.progress.since < critic.warmup

    # ------------------------------------------------------------------------ phases and references

    def settle(self, exact: bool) -> None:
        """Fixes what algorithm/correction=auto means in every phase."""
        self.exact, self.experiment = exact, settle_correction(self.configured, exact=exact)
        self.phases = schedules.phases(
            self.experiment
        )  # name → its whole experiment; one without a name if there are no phases

    def advance(self) -> str:
        """What follows from a step's metrics, once a step: controllers move, and perhaps the next
        phase begins; then a line says so.

        `begin` and `saved` do it too; before them `metrics` may be added to, as evaluations do.
        """
        before = self.progress.phase
        if self.progress.step == self.rl_step:
            return ""
        problems = schedules.unmeasured(self.experiment, self.progress, self.metrics)
        if problems:
            raise ConfigError("\n".join(problems))
        self.progress = schedules.advance(self.experiment, self.progress, self.metrics)
        if self.progress.phase == before:
            return ""
        names = list(self.phases)
        self.x = schedules.at(self.experiment, self.progress)
        kept = self.enter_phase()
        return (
            f"phase {names[before]} → {names[self.progress.phase]} after step {self.rl_step}:"
            f" {self.x.algorithm.name}; {kept}"
        )

    def enter_phase(self) -> str:
        """Begins the phase that `progress` names: what it brings starts from the policy as it is
        now. What was kept, what was reset."""
        name = list(self.phases)[self.progress.phase]
        phase = self.experiment.schedule.phases.get(name)
        owner = self.owner(name)
        reset = ["controllers that it brings"]
        if owner or (phase and "reference" in phase.reset):
            if self.phases[name].needs_reference:
                self.references[owner] = self.as_sharded(
                    self.x.reference.init(self.model, step=self.progress.since)
                )
            reset.append("reference")
        if phase and "optimizer" in phase.reset:
            for optimizer in self.optimizers:
                optimizer.state.clear()
            reset.append("optimizer moments")
        needed = {self.owner(later) for later in list(self.phases)[self.progress.phase :]}
        self.references = {key: state for key, state in self.references.items() if key in needed}
        kept = [what for what in ("optimizer moments", "reference") if what not in reset]
        return f"keeps {', '.join(['weights', 'prompt order', *kept])}; resets {', '.join(reset)}"

    def owner(self, phase: str) -> str:
        """Whose reference a phase uses: its own, or the run's ("")."""
        phases = self.experiment.schedule.phases
        return phase if phase in phases and phases[phase].reference is not None else ""

    @property
    def reference_key(self) -> str:
        """The owner of the reference in use."""
        return self.owner(list(self.phases)[self.progress.phase])

    def reference_of(self, owner: str) -> Any:
        """The reference functions of an owner."""
        return self.phases[owner].reference if owner else self.experiment.reference

    def reference_model(self) -> Any:
        """Context manager: the reference in use, to score with."""
        return self.as_policy(
            self.x.reference.model(self.references.get(self.reference_key), self.model)
        )

    def teacher_model(self, part: str) -> Any:
        """Context manager: the teacher of a part of the mixture, or of all prompts ("")."""
        return self.as_policy(
            self.experiment.teacher.models[part].model(self.teachers[part], self.model)
        )

    @contextmanager
    def as_policy(self, given: Any) -> Iterator[Any]:
        """A model to score with, computed as the policy's updates, also after a resume."""
        with given as model:
            if isinstance(model, torch.nn.Module):
                trunk, own = (trunk_and_head(one)[0] for one in (model, self.model))
                trunk.update_kernel = kernel_of(own)
            yield model

    def update_reference(self, terms: UpdateTerms) -> None:
        """Moves the reference in use, after the updates of a step."""
        key = self.reference_key
        if key in self.references:
            given = self.references[key], self.model
            self.references[key], terms.reference = moved(
                self.x.reference, *given, step=self.rl_step + 1, kl=terms.mean("kl")
            )
        for part, model in self.experiment.teacher.models.items() if self.teachers else ():
            self.teachers[part], _ = moved(
                model, self.teachers[part], self.model, step=self.rl_step + 1, kl=float("nan")
            )

    def shard(self, mesh: Any) -> None:
        """Lays policy and references in shards over the ranks of a mesh (FSDP2). The critic stays
        whole: one backward, one root."""
        self.optimizers.clear()  # they hold the whole weights
        mixed = precision(self.experiment, self.device) == "bf16-mixed"
        self.lay_out = partial(ranks.shard, mesh=mesh, gathered=torch.bfloat16 if mixed else None)
        self.lay_out(self.model)
        self.references = {
            owner: self.as_sharded(state) for owner, state in self.references.items()
        }
        self.teachers = {part: self.as_sharded(state) for part, state in self.teachers.items()}

    def as_sharded(self, reference: Any) -> Any:
        """A reference's state as the policy is: sharded or not."""
        return (
            reference if self.lay_out is None else shard_state(reference, self.model, self.lay_out)
        )

    # ------------------------------------------------------------------------ critic and optimizers

    def make_critic(self) -> torch.nn.Module | None:
        """The critic of the first phase that has one; it is built at the start, whenever it begins
        to learn."""
        active = [x.algorithm.critic for x in self.phases.values() if x.algorithm.critic.active]
        if not active:
            return None
        with torch.random.fork_rng(devices=[]):  # its random start changes nobody else's numbers
            torch.manual_seed(self.experiment.seed)
            return make_critic(
                self.model, model=active[0].model, trunk_gradient=active[0].trunk_gradient
            )

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the policy's optimiser moves."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """New optimizers of the policy and, if there is one, of the critic."""
        self.optimizers = [make_optimizer(self.experiment.optimizer, self.trained_parameters())]
        if self.critic is not None:
            critic: Any = next(
                x.algorithm.critic for x in self.phases.values() if x.algorithm.critic.active
            )
            self.optimizers.append(make_optimizer(critic.optimizer, list(self.critic.parameters())))
        return self.optimizers

    # ------------------------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Any]:
        """All that decides the steps to come, apart from the prompts and the generators, as a
        checkpoint of `rlkit train` holds it."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "state_dict": self.without_frozen(self.nets.state_dict()),
            "optimizer_states": optimizers,
            "rlkit": self.saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, of a checkpoint too. A learner of the same experiment then goes on bit for
        bit."""
        self.load(state)
        self.nets.load_state_dict(state["state_dict"], strict=False)
        for optimizer, saved in zip(self.optimizers, state["optimizer_states"], strict=True):
            optimizer.load_state_dict(saved)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds beside weights and optimizers, as plain types and tensors. A
        collective if there are shards."""
        self.advance()
        kernels = kernels_in_use(self.experiment.generation.engine, self.model)
        return {
            "rl_step": self.rl_step,
            "progress": self.progress._asdict(),
            "tokens": self.tokens,
            "updates": self.updates,
            "exact": self.exact,
            "start": (
                None
                if self.start is None
                else {n: t.cpu() for n, t in self.start._asdict().items() if t is not None}
            ),
            "moments": list(self.moments),
            "references": {
                owner: ranks.full_tensors(self.reference_of(owner).save(state))
                for owner, state in self.references.items()
            },
            "teachers": {
                part: ranks.full_tensors(self.experiment.teacher.models[part].save(s))
                for part, s in self.teachers.items()
            },
            "nonfinite": dict(self.nonfinite),
            "halvings": self.halvings,
            "threads": (
                torch.get_num_threads() if self.device.type == "cpu" else None
            ),  # a GPU's sums do not depend on them
            "kernel": kernels.get("decoding"),
            "update_kernel": kernels["updates"],
        }

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Puts that back, before the weights: references that begin with the run start from those
        of model.path."""
        state = checkpoint["rlkit"]
        self.rl_step, self.tokens, self.begun = state["rl_step"], state["tokens"], -1
        self.moments, self.updates = Moments(*state["moments"]), dict(state["updates"])
        self.nonfinite, self.halvings = state["nonfinite"], state["halvings"]
        threads = state["threads"] or torch.get_num_threads()
        if (
            self.experiment.trainer.threads is None and threads != torch.get_num_threads()
        ):  # the same sums in the same order
            torch.set_num_threads(threads)
            print(f"resume: computes with {threads} thread(s), as the run did so far", flush=True)
        for said in keep_kernels(self.experiment.generation.engine, self.model, state, self.critic):
            print(f"resume: {said}", flush=True)
        self.progress = schedules.Progress(**state["progress"])
        steps = (
            checkpoint.get("run", {})
            .get("config", {})
            .get("trainer", {})
            .get("steps", self.experiment.trainer.steps)
        )
        said = schedules.lengthened(self.experiment, self.progress, before=steps)
        if said:
            print(f"resume: {said}", flush=True)
        kept = state["start"]
        self.start = Batch(**kept) if kept else None
        exact = state["exact"]
        if (exact) != self.exact:  # as when the run began, whatever was found this time
            line = correction_in_words(self.configured, exact=exact)
            if line:
                print(f"resume: {line.partition(' (')[0]}, as when the run began", flush=True)
            self.settle(exact)
        self.x = schedules.at(self.experiment, self.progress)
        self.enter_phase()
        saved = state["references"]
        self.references = {
            owner: self.reference_of(owner).load(kept, self.model, saved.get(owner, {}))
            for owner, kept in self.references.items()
        }
        saved = state["teachers"]
        models = self.experiment.teacher.models
        self.teachers = {
            part: models[part].load(own, self.model, saved.get(part, {}))
            for part, own in self.teachers.items()
        }

    def without_frozen(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict without a frozen base, which comes from model.path: under LoRA the adapters
        that are trained, and the critic."""
        trained = {f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad}
        frozen = any(not p.requires_grad for p in self.model.parameters())
        return {
            k: v
            for k, v in state.items()
            if not frozen or k in trained or not k.startswith("model.")
        }
