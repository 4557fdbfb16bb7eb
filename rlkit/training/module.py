"""RLModule: the one training loop. `training_step` is the page to open first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlkit.algorithm import (
    asks,
    call,
    choose,
    estimate_advantages,
    hyperparameters,
    inputs,
    micro_batches,
    minibatches,
    quantities,
    scale_tokens,
    select,
    surrogate,
    value_surrogate,
    whole,
)
from rlkit.distributed import ranks
from rlkit.episodes import assemble, collect, failures, summarize
from rlkit.episodes.stream import StreamState, take
from rlkit.errors import ConfigError, NonFinite
from rlkit.functional import approximate_kl, mix
from rlkit.models.critic import make_critic
from rlkit.models.head import Head, trunk_and_head
from rlkit.models.packing import Packed, pack
from rlkit.models.score import score, states
from rlkit.rewards import Moments, normalise, score_spread, update_moments
from rlkit.system import rng
from rlkit.training import drift, schedules
from rlkit.training.experiment import Experiment, correction_in_words, settle_correction
from rlkit.training.memory import named, probe, retried
from rlkit.training.metrics import NAN, Clock, UpdateTerms, performance, refill_metrics, update_metrics
from rlkit.training.references import is_start, moved, shard_state
from rlkit.types import Batch, Policy, Rollout, Scores, Task


class RLModule(L.LightningModule):
    """Rolls out, scores, estimates advantages and updates policy and critic, one RL step per training_step.

    Everything that decides the future is explicit: `rl_step`, `progress` (phase and controllers), `stream` (the position in the
    prompts), `moments` (of the rewards), `references`, the weights and the optimizers. Sampling needs no generator state: its randomness
    is a function of (seed, step, prompt, sample). After each step `metrics` holds the row to log, `rollouts` the scored episodes and
    `trained` those of them that `batch` was made of, for the callbacks to read.
    """

    def __init__(self, experiment: Experiment, policy: Policy, tasks: Sequence[Task], *, exact: bool = False):
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # a frozen base is not in the checkpoint
        self.configured, self.policy, self.tasks = experiment, policy, tasks
        self.exact = exact  # whether the engine was found to give the trainer's log-probs; what decides algorithm/correction=auto
        self.experiment = experiment = settle_correction(experiment, exact=exact)
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
        self.start: Batch | None = (
            None  # a few rollouts of the first step, with the log-probs that the start gave them (rlkit.training.drift)
        )
        self.metrics: dict[str, Any] = {}
        self.rollouts: list[Rollout] = []
        self.trained: list[Rollout] = []
        self.batch: Batch | None = None
        self.clock = Clock()  # of the step under way
        self.droppable = False  # whether nothing is lost that cannot be done again: no update has begun
        self.before: tuple[StreamState, dict[str, Any]] | None = None  # stream and generators at the start of the step under way
        self.generators: list[dict[str, Any]] = []  # of the checkpoint's ranks, to be put back
        self.minibatch: Batch | None = None  # of the update under way
        self.nonfinite: dict[int, int] = {}  # optimiser → its updates in a row that were skipped since something was not finite
        self.halvings = 0  # of the micro-batches, since memory ran out
        self.provenance: dict[str, Any] = {}  # config, versions and git state, for the checkpoint

    # -------------------------------------------------------------------------------------------- one RL step

    def training_step(self, index: int, _: int) -> None:
        """Rollouts → rewards → advantages → updates → reference."""
        if self.progress.step < self.rl_step:
            self.advance()
        self.clock = self.clock.following(evaluated=self.metrics.get("perf/eval_s", 0.0))
        self.x = x = schedules.at(self.experiment, self.progress)
        self.before, self.droppable = (self.stream, rng.state()), True
        with named("generation", "lower generation.engine.max_cached_tokens or batch.prompts"):
            self.rollouts, trained = self.experience()
        self.droppable = False
        self.moments = update_moments(self.moments, trained)
        if x.reward.normalize:
            trained = normalise(trained, self.moments)
        with self.clock.part("update"), rng.drawn_from(mix(x.seed, self.rl_step)):  # of the whole batch: alike on all ranks
            batch = choose(assemble(trained, pad_token_id=self.policy.pad_token_id, device=self.device), x.algorithm)
            batch = scale_tokens(retried(self, batch, partial(self.with_scores, batch)), x.algorithm)
            batch = estimate_advantages(batch, x.algorithm, x.kl)
            terms, measured = UpdateTerms(), self.with_old(drift.few(batch) if x.algorithm.episodes is None else None)
            if self.rl_step == 0 and self.follows_drift():
                self.start = self.with_old(drift.few(assemble(self.rollouts, pad_token_id=self.policy.pad_token_id, device=self.device)))
            for minibatch in minibatches(batch, x.algorithm, seed=mix(x.seed, self.rl_step)):
                self.minibatch = minibatch
                if not retried(self, minibatch, partial(self.update, minibatch, terms), terms):
                    break
            terms.gather()
            self.minibatch = None
            drifted = {"kl/step": self.moved_since(measured), "kl/start": NAN if self.kl_is_from_start(x) else self.moved_since(self.start)}
            ranks.reshard(self.model)
            self.update_reference(terms)
        self.trained, self.batch = trained, batch
        self.rl_step, self.before = self.rl_step + 1, None
        self.tokens += int(batch.attention_mask.sum())
        self.metrics = summarize(self.rollouts) | update_metrics(batch, terms, x) | drifted
        self.metrics |= performance(batch, terms, self.clock, tokens=self.tokens, device=self.device)
        self.metrics |= refill_metrics(self.rollouts, trained, group_size=x.batch.group_size) | self.schedule_metrics()
        self.metrics = ranks.first(lambda: self.metrics)  # its clock; everything else is equal
        self.trainer.should_stop = ranks.anywhere(self.rl_step >= self.total_steps or self.out_of_time())
        self.clock.end()

    def drop_step(self) -> None:
        """Back to where the step under way began. Rollouts and their rewards move nothing but the prompts and the generators."""
        if self.before is not None:
            self.stream, generators = self.before
            rng.restore(generators)
            self.before = None

    def experience(self) -> tuple[list[Rollout], list[Rollout]]:
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
            with self.clock.part("generate"):
                rollouts = self.roll_out(tasks, first=len(sampled) // x.batch.group_size)
            failures(rollouts)
            if x.algorithm.episodes is None:
                with self.clock.part("reward"):
                    rollouts = score_spread(rollouts, x.reward)
            sampled += rollouts
            with rng.drawn_from(mix(x.seed, self.rl_step, len(sampled))):
                accepted += self.accepted(rollouts) if x.algorithm.max_refills else rollouts
        return sampled, accepted or sampled

    def accepted(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The groups of which the group filter keeps something."""
        given = quantities(assemble(rollouts, pad_token_id=self.policy.pad_token_id))
        kept = {r.group for r, keep in zip(rollouts, call(self.x.algorithm.group_filter, given).tolist(), strict=True) if keep}
        return [r for r in rollouts if r.group in kept]

    def roll_out(self, tasks: Sequence[Task], *, first: int) -> list[Rollout]:
        """Episodes sampled from the policy as it is now; `first` is the position of the first task in the step.

        Every rank plays those of some of the tasks, and all ranks get all of them.
        """
        x = self.x

        def play(own: Sequence[Task], begin: int) -> list[Rollout]:
            return (x.algorithm.episodes or collect)(
                self.policy,
                own,
                generate=self.clock.engine(x.generation.engine),
                environment=x.environment,
                group_size=x.batch.group_size,
                seed=x.seed,
                step=self.rl_step,
                first=first + begin,
                **x.generation.settings,
            )

        with ranks.whole_weights(self.model):
            return ranks.spread(tasks, play)

    def with_scores(self, batch: Batch) -> Batch:
        """Old log-probs, entropies and values, and reference log-probs, where anything before or in the update needs them.

        With one epoch of one minibatch the old policy is the current one, so "old" is its detached value and costs nothing. A KL in
        the baseline is that of every rollout, so there those are scored too that are not trained on.
        """
        a, kl = self.x.algorithm, self.x.kl
        before = (a.advantage, a.normalization, a.overlong, a.correction, a.token_filter)
        asked = {name for part in before for name in inputs(part)} & {"logprobs_old", "entropy_old", "values"}
        read = whole(batch) if kl.in_baseline else batch
        with torch.no_grad():
            if a.epochs * a.minibatches > 1 or asked or kl.in_reward or a.critic.active:
                old = self.score(self.model, read, critic=self.critic if a.critic.active else None)
                batch = batch._replace(logprobs_old=old.logprobs, entropy_old=old.entropy, values=old.values)
            if kl.active:
                with self.reference_model() as model:
                    batch = batch._replace(logprobs_ref=self.score(model, read).logprobs)
        return batch

    def score(self, model: torch.nn.Module, batch: Batch, *, critic: torch.nn.Module | None = None) -> Scores:
        """Scores [B, T] of a batch, one micro-batch at a time."""
        out: dict[str, Tensor] = {}
        for rows, counts in self.portions(batch):
            part = select(batch, rows)
            packed = pack(part.ids, part.response_mask)
            with self.clock.part("model"):
                scores = ranks.inside(model, score, packed, temperature=self.temperature, critic=critic)
            for name, value in scores._asdict().items():
                if value is not None:
                    whole = out.setdefault(name, torch.zeros_like(batch.logprobs_sampler))
                    if counts:
                        whole[rows, : part.ids.shape[1]] = value.to(whole.dtype)
        ranks.add_up(out.values())
        nothing = torch.zeros_like(batch.logprobs_sampler)  # no row has a trained token
        return Scores(**out) if out else Scores(nothing, nothing, None if critic is None else nothing)

    def with_old(self, batch: Batch | None) -> Batch | None:
        """The batch with the log-probs of the policy as it is now, where it has none of the old one."""
        if batch is None or batch.logprobs_old is not None:
            return batch
        with torch.no_grad():
            return batch._replace(logprobs_old=self.score(self.model, batch).logprobs)

    def moved_since(self, batch: Batch | None) -> float:
        """KL(old‖now) in nats per token on the batch's tokens, k3; nan without a batch."""
        if batch is None:
            return NAN
        here = drift.on(batch, self.device)
        assert here.logprobs_old is not None
        with torch.no_grad():
            return float(approximate_kl(self.score(self.model, here).logprobs, here.logprobs_old, here.response_mask))

    def kl_is_from_start(self, x: Experiment) -> bool:
        """Whether this step's KL has the start of the run as its reference, so that kl/ref is the drift."""
        return x.kl.active and self.reference_key == "" and is_start(x.reference)

    def follows_drift(self) -> bool:
        """Whether any step may ask how far the policy is from its start, and the first one is sampled from it."""
        return self.x.algorithm.episodes is None and not all(
            x.kl.active and not self.owner(name) and is_start(x.reference) for name, x in self.phases.items()
        )

    def portions(self, batch: Batch) -> Iterable[tuple[Tensor, bool]]:
        """The micro-batches of this rank as row numbers, equally many on every rank, and whether each counts."""
        limit = self.micro_batch_tokens
        if ranks.size() == 1:
            return ((rows, True) for rows in micro_batches(batch, limit))
        own = ranks.own_groups(batch.attention_mask.sum(1), batch.group_ids[batch.rollout_ids])
        mine = batch._replace(response_mask=batch.response_mask & own[:, None])
        return ranks.padded(list(micro_batches(mine, limit)), spare=lambda: list(micro_batches(batch, 1))[-1])

    def update(self, minibatch: Batch, terms: UpdateTerms) -> bool:
        """One step of each optimiser; False ends the updates of this RL step. Micro-batches only sum: their weights are fixed before."""
        x, critic = self.x, self.x.algorithm.critic
        learns = not self.warming_up() and self.has_signal(minibatch)
        if not learns and not critic.active:
            terms.skip("no_signal")
            return True
        ranks.reshard(self.model)
        self.zero_grad()
        moved, tokens, summed, limit = 0.0, 0.0, 0.0, x.algorithm.target_kl
        for rows, counts in self.portions(minibatch):
            part = select(minibatch, rows)
            packed = pack(part.ids, part.response_mask)
            if not counts and part.weights is not None:
                part = part._replace(weights=torch.zeros_like(part.weights))
            scores = self.trained_scores(packed)
            loss, parts = surrogate(part, scores, x.algorithm, x.kl)
            total = loss if learns else loss.new_zeros(())
            if critic.active:
                value_loss, value_parts = value_surrogate(part, scores, critic)
                total, parts = total + value_loss, parts | value_parts
            summed += float(total.detach())
            if total.requires_grad:
                with self.clock.part("model"):
                    self.manual_backward(total)
            if counts:
                terms.add(part, loss, scores, parts, packed)
            if counts and limit is not None and part.logprobs_old is not None:
                count = int(part.response_mask.sum())
                moved += count * float(approximate_kl(scores.logprobs.detach(), part.logprobs_old, part.response_mask))
                tokens += count
        moved, tokens = ranks.total(moved, tokens) if limit is not None else (moved, tokens)
        if limit is not None and moved > limit * tokens:
            terms.skip("target_kl")
            return False
        with self.clock.part("model"):
            summed = sum(ranks.total(summed))
            if learns:
                terms.stepped("policy", *self.step_optimizer(0, x.optimizer, self.trained_parameters(), summed))
            if self.critic is not None and critic.active:
                terms.stepped("critic", *self.step_optimizer(1, critic.optimizer, self.critic.parameters(), summed))
        return True

    def trained_scores(self, packed: Packed) -> Scores:
        """What an update learns from: scores by policy and critic that carry their gradients."""
        a = self.x.algorithm
        with self.clock.part("model"):
            return ranks.inside(
                self.model,
                score,
                packed,
                temperature=self.temperature,
                entropy_gradient=bool(a.entropy_coef),
                critic=self.critic if a.critic.active else None,
                reference=self.exact_reference(packed),
            )

    def step_optimizer(self, index: int, configured: Any, parameters: Iterable[torch.nn.Parameter], loss: float) -> tuple[float, float]:
        """Clips and steps one optimiser at the learning rate in force; its gradient norm and rate.

        No step where the loss or the norm is not finite: the norm is nan then. Raises NonFinite after trainer.max_nonfinite in a row.
        """
        optimizers: Any = self.optimizers()
        optimizer = optimizers[index] if isinstance(optimizers, list) else optimizers
        rate = hyperparameters(configured).get("lr", optimizer.param_groups[0]["lr"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        parameters = list(parameters)
        ranks.add_up(p.grad for p in parameters if not hasattr(p, "full_tensor"))  # shards have been added up on the way
        norm = float(ranks.whole(torch.nn.utils.clip_grad_norm_(parameters, self.x.trainer.max_grad_norm)))
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
        return (norm if finite else NAN), rate

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
                self.references[owner] = self.as_sharded(self.x.reference.init(self.model, step=self.progress.since))
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

    def update_reference(self, terms: UpdateTerms) -> None:
        """Moves the reference in use, after the updates of a step."""
        if self.reference_key in self.references:
            state = self.references[self.reference_key]
            now, kl = self.rl_step + 1, terms.mean("kl")
            self.references[self.reference_key], terms.reference = moved(self.x.reference, state, self.model, step=now, kl=kl)

    def exact_reference(self, packed: Packed) -> tuple[Tensor, Head] | None:
        """Hidden states and head of the reference, where the KL is exact over the vocabulary."""
        if not self.x.kl.active or not asks(self.x.kl.estimator, "full_kl"):
            return None
        with self.reference_model() as model, torch.no_grad():
            return ranks.inside(model, states, packed), trunk_and_head(model)[1]

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

    def configure_model(self) -> None:
        if self.experiment.trainer.strategy == "fsdp" and ranks.size() > 1 and not ranks.sharded(self.model):
            ranks.shard(self.model, self.device_mesh["data_parallel"])  # type: ignore[index]  # a critic stays whole: one backward, one root
            self.references = {owner: self.as_sharded(state) for owner, state in self.references.items()}

    def as_sharded(self, reference: Any) -> Any:
        """A reference's state as the policy is: sharded or not."""
        sharded = ranks.size() > 1 and ranks.sharded(self.model)
        return shard_state(reference, self.model, self.device_mesh["data_parallel"]) if sharded else reference  # type: ignore[index]

    def on_train_start(self) -> None:
        if self.device.type == "cuda" and self.trainer.world_size == 1:
            probe(self)
        self.droppable = False
        if self.rl_step >= self.total_steps:  # resumed for its last files alone; the loop would wait for a batch for ever
            self.trainer.should_stop = True
        if ranks.rank() < len(self.generators):  # only now: setting up draws from them
            rng.restore(self.generators[ranks.rank()])
        elif ranks.rank():  # the checkpoint knows no such rank, or there is none
            rng.seed(mix(self.experiment.seed, self.rl_step, ranks.rank()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fill(checkpoint, ranks.gather(rng.state))

    def fill(self, checkpoint: dict[str, Any], generators: list[dict[str, Any]]) -> None:
        """Adds to a checkpoint what Lightning does not know of, and takes the frozen base out. `generators`: of the ranks, in order."""
        checkpoint["state_dict"] = self.without_frozen(checkpoint["state_dict"])
        checkpoint["rlkit"] = {
            "rl_step": self.rl_step,
            "progress": self.progress._asdict(),
            "tokens": self.tokens,
            "exact": self.exact,
            "start": None if self.start is None else {n: t.cpu() for n, t in self.start._asdict().items() if t is not None},
            "stream": list(self.stream),
            "moments": list(self.moments),
            "references": {owner: ranks.whole(self.reference_of(owner).save(state)) for owner, state in self.references.items()},
            "generators": generators,
            "nonfinite": self.nonfinite,
            "halvings": self.halvings,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,  # a GPU's sums do not depend on them
        }
        checkpoint["run"] = self.provenance

    def without_frozen(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict without a frozen base, which comes from model.path: under LoRA the adapters that are trained, and the critic."""
        trained = {f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad}
        frozen = any(not p.requires_grad for p in self.model.parameters())
        return {k: v for k, v in state.items() if not frozen or k in trained or not k.startswith("model.")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlkit"]
        self.rl_step, self.tokens, self.stream = state["rl_step"], state["tokens"], StreamState(*state["stream"])
        self.moments = Moments(*state["moments"])
        self.generators = state["generators"]
        self.nonfinite, self.halvings = state.get("nonfinite", {}), state.get("halvings", 0)
        threads = state.get("threads") or torch.get_num_threads()
        if self.experiment.trainer.threads is None and threads != torch.get_num_threads():  # the same sums in the same order
            torch.set_num_threads(threads)
            print(f"resume: computes with {threads} thread(s), as the run did so far", flush=True)
        self.progress = schedules.Progress(**state["progress"])
        before = checkpoint.get("run", {}).get("config", {}).get("trainer", {}).get("steps", self.total_steps)
        if said := schedules.lengthened(self.experiment, self.progress, before=before):
            self.print(f"resume: {said}")
        self.start = Batch(**kept) if (kept := state.get("start")) else None
        self.keep_correction(state.get("exact", self.exact))
        self.x = schedules.at(self.experiment, self.progress)
        self.enter_phase()
        saved = state["references"]
        self.references = {
            owner: self.reference_of(owner).load(kept, self.model, saved.get(owner, {})) for owner, kept in self.references.items()
        }

    def keep_correction(self, exact: bool) -> None:
        """Goes on with what algorithm/correction=auto meant when the run began, whatever was found this time."""
        if exact != self.exact and (line := correction_in_words(self.configured, exact=exact)):
            print(f"resume: {line.partition(' (')[0]}, as when the run began", flush=True)
        self.exact = exact
        self.experiment = settle_correction(self.configured, exact=exact)
        self.phases = schedules.phases(self.experiment)

    def reference_of(self, owner: str) -> Any:
        """The reference functions of an owner."""
        return self.phases[owner].reference if owner else self.experiment.reference
