"""RLModule: the one training loop. `training_step` is the page to open first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from math import isfinite, nan
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlkit import rng, schedules
from rlkit.algorithm import (
    asks,
    call,
    choose,
    estimate_advantages,
    inputs,
    micro_batches,
    minibatches,
    quantities,
    scale_tokens,
    select,
    surrogate,
    value_surrogate,
)
from rlkit.errors import ConfigError, NonFinite
from rlkit.functional import approximate_kl, mix
from rlkit.memory import named, probe, retried
from rlkit.models.critic import make_critic
from rlkit.models.score import score, states, trunk_and_head
from rlkit.monitor import Clock, UpdateTerms, hyperparameters, peak_memory, update_metrics
from rlkit.rewards import Moments, normalise, update_moments
from rlkit.rewards import score as score_rollouts
from rlkit.rollouts import assemble, collect, summarize
from rlkit.settings import Experiment
from rlkit.tasks.stream import StreamState, take
from rlkit.types import Batch, Policy, Rollout, Scores, Task


class RLModule(L.LightningModule):
    """Rolls out, scores, estimates advantages and updates policy and critic, one RL step per training_step.

    Everything that decides the future is explicit: `rl_step`, `progress` (phase and controllers), `stream` (the position in the
    prompts), `moments` (of the rewards), `references`, the weights and the optimizers. Sampling needs no generator state: its randomness
    is a function of (seed, step, prompt, sample). After each step `metrics` holds the row to log and `rollouts` the scored episodes, for
    the callbacks to read.
    """

    def __init__(self, experiment: Experiment, policy: Policy, tasks: Sequence[Task]):
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # a frozen base is not in the checkpoint
        self.experiment, self.policy, self.tasks = experiment, policy, tasks
        self.phases = schedules.phases(experiment)  # name → its whole experiment; one without a name where there are no phases
        self.progress = schedules.start(experiment)
        self.x = schedules.at(experiment, self.progress)  # the experiment of this step: its phase, and scheduled numbers as they are now
        self.model = policy.model
        self.critic = self.make_critic()
        self.rl_step, self.tokens, self.started = 0, 0, time.perf_counter()
        self.stream = StreamState(epoch=0, position=0)
        self.moments = Moments()  # of all rewards so far
        self.references: dict[str, Any] = {}  # owner ("" for the run's own, else a phase) → state
        if any(x.needs_reference for name, x in self.phases.items() if not self.owner(name)):
            self.references[""] = experiment.reference.init(self.model, step=0)
        self.enter_phase()
        self.metrics: dict[str, Any] = {}
        self.rollouts: list[Rollout] = []
        self.droppable = False  # whether nothing is lost that cannot be done again: no update has begun
        self.before: tuple[StreamState, dict[str, Any]] | None = None  # stream and generators at the start of the step under way
        self.generators: dict[str, Any] | None = None  # of the checkpoint, to be put back
        self.clock = Clock()  # of the step under way
        self.minibatch: Batch | None = None  # of the update under way
        self.nonfinite: dict[int, int] = {}  # optimiser → its updates in a row that were skipped since something was not finite
        self.halvings = 0  # of the micro-batches, since memory ran out
        self.provenance: dict[str, Any] = {}  # config, versions and git state, for the checkpoint

    # -------------------------------------------------------------------------------------------- one RL step

    def training_step(self, index: int, _: int) -> None:
        """Rollouts → rewards → advantages → updates → reference."""
        if self.progress.step < self.rl_step:
            self.advance()
        clock = self.clock = Clock()
        self.x = x = schedules.at(self.experiment, self.progress)
        self.before, self.droppable = (self.stream, rng.state()), True
        with named("generation", "lower generation.engine.max_cached_tokens or batch.prompts"):
            self.rollouts, trained = self.experience(clock)
        self.droppable = False
        self.moments = update_moments(self.moments, trained)
        if x.reward.normalize:
            trained = normalise(trained, self.moments)
        with clock.part("update"):
            batch = choose(assemble(trained, pad_token_id=self.policy.pad_token_id, device=self.device), x.algorithm)
            batch = scale_tokens(retried(self, batch, partial(self.with_scores, batch)), x.algorithm)
            batch = estimate_advantages(batch, x.algorithm, x.kl)
            terms = UpdateTerms()
            for minibatch in minibatches(batch, x.algorithm, seed=mix(x.seed, self.rl_step)):
                self.minibatch = minibatch
                if not retried(self, minibatch, partial(self.update, minibatch, terms), terms):
                    break
            self.minibatch = None
            self.update_reference(terms.mean("kl"))
        self.rl_step, self.before = self.rl_step + 1, None
        self.tokens += int(batch.attention_mask.sum())
        self.metrics = summarize(self.rollouts) | update_metrics(batch, terms, x) | self.performance(batch, clock)
        self.metrics |= self.refill_metrics(trained) | self.schedule_metrics()
        self.trainer.should_stop = self.rl_step >= self.total_steps or self.out_of_time()

    def drop_step(self) -> None:
        """Back to where the step under way began. Rollouts and their rewards move nothing but the prompts and the generators."""
        if self.before is not None:
            self.stream, generators = self.before
            rng.restore(generators)
            self.before = None

    def experience(self, clock: Clock) -> tuple[list[Rollout], list[Rollout]]:
        """All scored episodes of the step, and those to train on.

        With `max_refills` these are the groups that the group filter accepts, of as many rounds of further prompts as it takes to
        have batch.prompts of them (dynamic sampling, DAPO, Yu et al. 2025, section 3.2). Where it accepts none, it is all of them,
        and the filter leaves nothing to train on.
        """
        x = self.x
        sampled: list[Rollout] = []
        accepted: list[Rollout] = []
        for _ in range(1 + x.algorithm.max_refills):
            missing = x.batch.prompts - len(accepted) // x.batch.group_size
            if not missing:
                break
            tasks, self.stream = take(self.tasks, self.stream, missing, seed=x.seed)
            with clock.part("generate"):
                rollouts = self.roll_out(tasks, first=len(sampled) // x.batch.group_size)
            with clock.part("reward"):
                rollouts = score_rollouts(rollouts, x.reward)
            sampled += rollouts
            accepted += self.accepted(rollouts) if x.algorithm.max_refills else rollouts
        return sampled, accepted or sampled

    def accepted(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The groups of which the group filter keeps something."""
        given = quantities(assemble(rollouts, pad_token_id=self.policy.pad_token_id))
        kept = {r.group for r, keep in zip(rollouts, call(self.x.algorithm.group_filter, given).tolist(), strict=True) if keep}
        return [r for r in rollouts if r.group in kept]

    def roll_out(self, tasks: Sequence[Task], *, first: int) -> list[Rollout]:
        """Episodes sampled from the policy as it is now; `first` is the position of the first task in the step."""
        x = self.x
        return collect(
            self.policy,
            tasks,
            generate=x.generation.engine,
            environment=x.environment,
            group_size=x.batch.group_size,
            seed=x.seed,
            step=self.rl_step,
            first=first,
            **x.generation.settings,
        )

    def with_scores(self, batch: Batch) -> Batch:
        """Old log-probs, entropies and values, and reference log-probs, where anything before or in the update needs them.

        With one epoch of one minibatch the old policy is the current one, so "old" is its detached value and costs nothing.
        """
        a, kl = self.x.algorithm, self.x.kl
        before = (a.advantage, a.normalization, a.overlong, a.correction, a.token_filter)
        asked = {name for part in before for name in inputs(part)} & {"logprobs_old", "entropy_old", "values"}
        with torch.no_grad():
            if a.epochs * a.minibatches > 1 or asked or kl.in_reward or a.critic.active:
                old = self.score(self.model, batch, critic=self.critic if a.critic.active else None)
                batch = batch._replace(logprobs_old=old.logprobs, entropy_old=old.entropy, values=old.values)
            if kl.active:
                with self.reference_model() as model:
                    batch = batch._replace(logprobs_ref=self.score(model, batch).logprobs)
        return batch

    def score(self, model: torch.nn.Module, batch: Batch, *, critic: torch.nn.Module | None = None) -> Scores:
        """Scores [B, T] of a batch, one micro-batch at a time."""
        out: dict[str, Tensor] = {}
        for rows in micro_batches(batch, self.micro_batch_tokens):
            part = select(batch, rows)
            scores = score(model, part.ids, part.response_mask, temperature=self.temperature, critic=critic)
            for name, value in scores._asdict().items():
                if value is not None:
                    whole = out.setdefault(name, torch.zeros_like(batch.logprobs_sampler))
                    whole[rows, : part.ids.shape[1]] = value.to(whole.dtype)
        nothing = torch.zeros_like(batch.logprobs_sampler)  # no row has a trained token
        return Scores(**out) if out else Scores(nothing, nothing, None if critic is None else nothing)

    def update(self, minibatch: Batch, terms: UpdateTerms) -> bool:
        """One step of each optimiser; False ends the updates of this RL step. Micro-batches only sum: their weights are fixed before."""
        x, critic = self.x, self.x.algorithm.critic
        learns = not self.warming_up() and self.has_signal(minibatch)
        if not learns and not critic.active:
            terms.skip("no_signal")
            return True
        self.zero_grad()
        moved, tokens, summed, limit = 0.0, 0, 0.0, x.algorithm.target_kl
        for rows in micro_batches(minibatch, self.micro_batch_tokens):
            part = select(minibatch, rows)
            scores = score(
                self.model,
                part.ids,
                part.response_mask,
                temperature=self.temperature,
                entropy_gradient=bool(x.algorithm.entropy_coef),
                critic=self.critic if critic.active else None,
                reference=self.exact_reference(part),
            )
            loss, parts = surrogate(part, scores, x.algorithm, x.kl)
            total = loss if learns else loss.new_zeros(())
            if critic.active:
                value_loss, value_parts = value_surrogate(part, scores, critic)
                total, parts = total + value_loss, parts | value_parts
            summed += float(total.detach())
            if total.requires_grad:
                self.manual_backward(total)
            terms.add(part, loss, scores, parts)
            if limit is not None and part.logprobs_old is not None:
                count = int(part.response_mask.sum())
                moved += count * float(approximate_kl(scores.logprobs.detach(), part.logprobs_old, part.response_mask))
                tokens += count
        if limit is not None and moved > limit * tokens:
            terms.skip("target_kl")
            return False
        if learns:
            terms.stepped("policy", *self.step_optimizer(0, x.optimizer, self.trained_parameters(), summed))
        if self.critic is not None and critic.active:
            terms.stepped("critic", *self.step_optimizer(1, critic.optimizer, self.critic.parameters(), summed))
        return True

    def step_optimizer(self, index: int, configured: Any, parameters: Any, loss: float) -> tuple[float, float]:
        """Clips and steps one optimiser at the learning rate in force; its gradient norm and rate.

        No step where the loss or the norm is not finite: the norm is nan then. Raises NonFinite after trainer.max_nonfinite in a row.
        """
        optimizers: Any = self.optimizers()
        optimizer = optimizers[index] if isinstance(optimizers, list) else optimizers
        rate = hyperparameters(configured).get("lr", optimizer.param_groups[0]["lr"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.x.trainer.max_grad_norm))
        finite = isfinite(norm) and isfinite(loss)
        self.nonfinite[index] = 0 if finite else self.nonfinite.get(index, 0) + 1
        if self.nonfinite[index] >= self.x.trainer.max_nonfinite:
            raise NonFinite(
                f"step {self.rl_step + 1}: {self.nonfinite[index]} updates in a row had a loss ({loss:g}) or a gradient (norm {norm:g}) "
                "that is not finite and were skipped (trainer.max_nonfinite); a lower optimizer.lr, trainer.precision=32-true or another "
                "kl often helps"
            )
        if finite:
            with named("the optimiser's step", "train adapters (model.lora.rank=16), or a smaller model"):
                optimizer.step()
        return (norm if finite else nan), rate

    @property
    def micro_batch_tokens(self) -> int:
        """trainer.micro_batch_tokens, halved as often as memory ran out."""
        return max(1, self.x.trainer.micro_batch_tokens >> self.halvings)

    def has_signal(self, batch: Batch) -> bool:
        """False where every term of the policy's loss is constant. Stepping would only replay old momentum."""
        a = self.x.algorithm
        return self.x.kl.in_loss or bool(a.entropy_coef) or batch.advantages is None or bool(batch.advantages.any())

    # ------------------------------------------------------------------------------- phases, reference and critic

    def advance(self) -> str:
        """What follows from a step's metrics: controllers move, and perhaps the next phase begins; then a line that says so."""
        before = self.progress.phase
        if problems := schedules.unmeasured(self.experiment, self.progress, self.metrics):
            raise ConfigError("\n".join(problems))
        self.progress = schedules.advance(self.experiment, self.progress, self.metrics)
        if self.progress.phase == before:
            return ""
        names = list(self.phases)
        self.x = schedules.at(self.experiment, self.progress)
        kept = self.enter_phase()
        return f"phase {names[before]} → {names[self.progress.phase]} after step {self.rl_step}: {self.x.algorithm.name}; {kept}"

    def enter_phase(self) -> str:
        """Begins the phase that `progress` names: what it brings starts from the policy as it is now. What was kept, what was reset."""
        name = list(self.phases)[self.progress.phase]
        phase = self.experiment.schedule.phases.get(name)
        owner = self.owner(name)
        reset = ["controllers that it brings"]
        if owner or (phase and "reference" in phase.reset):
            if self.phases[name].needs_reference:
                self.references[owner] = self.x.reference.init(self.model, step=self.progress.since)
            reset.append("reference")
        if phase and "optimizer" in phase.reset and self._trainer is not None:
            for optimizer in self.trainer.optimizers:
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

    def reference_model(self) -> Any:
        """Context manager: the reference in use, to score with."""
        return self.x.reference.model(self.references.get(self.reference_key), self.model)

    def update_reference(self, kl: float) -> None:
        """Moves the reference in use, after the updates of a step."""
        if self.reference_key in self.references:
            state = self.references[self.reference_key]
            self.references[self.reference_key] = self.x.reference.update(state, self.model, step=self.rl_step + 1, kl=kl)

    def exact_reference(self, batch: Batch) -> tuple[Tensor, torch.nn.Module] | None:
        """Hidden states and head of the reference, where the KL is exact over the vocabulary."""
        if not self.x.kl.active or not asks(self.x.kl.estimator, "full_kl"):
            return None
        with self.reference_model() as model, torch.no_grad():
            return states(model, batch.ids, batch.response_mask), trunk_and_head(model)[1]

    def make_critic(self) -> torch.nn.Module | None:
        """The critic of the first phase that has one; it is built at the start, whenever it begins to learn."""
        active = [x.algorithm.critic for x in self.phases.values() if x.algorithm.critic.active]
        if not active:
            return None
        with torch.random.fork_rng(devices=[]):  # its random start changes nobody else's numbers
            torch.manual_seed(self.experiment.seed)
            return make_critic(self.model, model=active[0].model, trunk_gradient=active[0].trunk_gradient)

    def warming_up(self) -> bool:
        """Whether the critic learns alone, in the first steps of its phase."""
        critic = self.x.algorithm.critic
        return critic.active and self.rl_step - self.progress.since < critic.warmup

    @property
    def total_steps(self) -> int:
        """RL steps of the whole run."""
        return self.experiment.trainer.steps

    def out_of_time(self) -> bool:
        """Whether trainer.max_time has passed since this process began to train."""
        limit = self.experiment.trainer.max_time
        return limit is not None and time.perf_counter() - self.started > 60 * limit

    @property
    def temperature(self) -> float:
        """What the trained log-probs are divided by: the sampler's temperature, 1 for a greedy sampler."""
        return self.x.generation.temperature or 1.0

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimiser moves."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def performance(self, batch: Batch, clock: Clock) -> dict[str, float]:
        """Wall-clock figures; everything here is left out where runs are compared for identity."""
        seconds = clock.total()
        real = int(batch.attention_mask.sum())
        return {
            "tokens/total": self.tokens,
            "tokens/sampled": int(batch.response_mask.sum()),
            "perf/padding_frac": 1 - real / batch.ids.numel(),
            "perf/step_s": seconds,
            "perf/tokens_per_s": real / seconds,
            **{f"perf/{name}_s": value for name, value in clock.parts.items()},
            "perf/peak_mem_gb": peak_memory(self.device),
        }

    def refill_metrics(self, trained: list[Rollout]) -> dict[str, float]:
        """batch/rollouts: trained on. group/sampled: prompts of the step; group/acceptance_rate: the share of them that was trained on."""
        sampled = len(self.rollouts) // self.x.batch.group_size
        rate = len({r.group for r in trained}) / sampled
        return {"batch/rollouts": len(trained), "group/sampled": sampled, "group/acceptance_rate": rate}

    def schedule_metrics(self) -> dict[str, Any]:
        """schedule/PATH: every scheduled number as it was in this step; schedule/phase: which phase, from 0."""
        numbers = {f"schedule/{path}": value for path, value in schedules.values(self.experiment, self.progress).items()}
        return numbers | ({"schedule/phase": self.progress.phase} if len(self.phases) > 1 else {})

    # ------------------------------------------------------------------------------------------------ Lightning

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = [self.experiment.optimizer(self.trained_parameters())]
        if self.critic is not None:
            critic = next(x.algorithm.critic for x in self.phases.values() if x.algorithm.critic.active)
            optimizers.append(critic.optimizer(self.critic.parameters()))
        return optimizers

    def on_train_start(self) -> None:
        if self.device.type == "cuda" and self.trainer.world_size == 1:
            probe(self)
        self.droppable = False
        if self.generators is not None:  # only now: setting up draws from them
            rng.restore(self.generators)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        frozen = {f"model.{name}" for name, p in self.model.named_parameters() if not p.requires_grad}
        if frozen:  # LoRA: the base comes from model.path
            trained = {f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad}
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained or not k.startswith("model.")}
        checkpoint["rlkit"] = {
            "rl_step": self.rl_step,
            "progress": self.progress._asdict(),
            "tokens": self.tokens,
            "stream": list(self.stream),
            "moments": list(self.moments),
            "references": {owner: self.reference_of(owner).save(state) for owner, state in self.references.items()},
            "generators": rng.state(),
            "nonfinite": self.nonfinite,
            "halvings": self.halvings,
        }
        checkpoint["run"] = self.provenance

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlkit"]
        self.rl_step, self.tokens, self.stream = state["rl_step"], state["tokens"], StreamState(*state["stream"])
        self.moments = Moments(*state["moments"])
        self.generators = state.get("generators")
        self.nonfinite, self.halvings = state.get("nonfinite", {}), state.get("halvings", 0)
        self.progress = schedules.Progress(**state["progress"])
        self.x = schedules.at(self.experiment, self.progress)
        self.enter_phase()
        saved = state["references"]
        self.references = {
            owner: self.reference_of(owner).load(kept, self.model, saved.get(owner, {})) for owner, kept in self.references.items()
        }

    def reference_of(self, owner: str) -> Any:
        """The reference functions of an owner."""
        return self.phases[owner].reference if owner else self.experiment.reference
