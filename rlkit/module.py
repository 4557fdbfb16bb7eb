"""RLModule: the one training loop. `training_step` is the page to open first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor

from rlkit.algorithm import choose, estimate_advantages, micro_batches, minibatches, scale_tokens, select, surrogate
from rlkit.functional import mix
from rlkit.models.score import score
from rlkit.monitor import UpdateTerms, hyperparameters, update_metrics
from rlkit.reference import none
from rlkit.rewards import score as score_rollouts
from rlkit.rollouts import assemble, collect, summarize
from rlkit.schedules import Progress, advance, at, start
from rlkit.settings import Experiment
from rlkit.tasks.stream import StreamState, take
from rlkit.types import Batch, Policy, Rollout, Task


class RLModule(L.LightningModule):
    """Rolls out, scores, estimates advantages and updates the policy, one RL step per training_step.

    Everything that decides the future is explicit: `progress`, `stream` (the position in the prompts), `reference_state`, the
    weights and the optimizer. Sampling needs no generator state: its randomness is a function of (seed, step, prompt, sample).
    After each step `metrics` holds the row to log and `rollouts` the scored episodes, for the callbacks to read.
    """

    def __init__(self, experiment: Experiment, policy: Policy, tasks: Sequence[Task]):
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # a frozen base is not in the checkpoint
        self.policy, self.tasks = policy, tasks
        self.model = policy.model
        self.experiment, self.progress = experiment, start(experiment)
        self.x = at(experiment, self.progress)  # of this step: its phase's parts, its scheduled numbers
        self.tokens, self.started = 0, time.perf_counter()
        self.stream = StreamState(epoch=0, position=0)
        self.reference = experiment.reference if experiment.needs_reference else none()
        # In a tuple, so that torch does not take the reference's weights for the policy's.
        self.reference_state = (self.reference.init(self.model),)
        self.metrics: dict[str, float] = {}
        self.rollouts: list[Rollout] = []

    # -------------------------------------------------------------------------------------------- one RL step

    def training_step(self, index: int, _: int) -> None:
        """Rollouts → rewards → advantages → updates → reference."""
        clock = Clock()
        self.x = x = at(self.experiment, self.progress)
        tasks, self.stream = take(self.tasks, self.stream, x.batch.prompts, seed=x.seed)
        with clock.part("generate"):
            rollouts = self.roll_out(tasks)
        with clock.part("reward"):
            self.rollouts = score_rollouts(rollouts, x.reward)
        with clock.part("update"):
            batch = assemble(self.rollouts, pad_token_id=self.policy.pad_token_id, device=self.device)
            batch = self.with_logprobs(choose(batch, x.algorithm))
            batch = estimate_advantages(scale_tokens(batch, x.algorithm), x.algorithm, x.kl)
            terms = UpdateTerms()
            for minibatch in minibatches(batch, x.algorithm, seed=mix(x.seed, self.rl_step)):
                self.update(minibatch, terms)
            state = self.reference.update(self.reference_state[0], self.model, step=self.rl_step + 1, kl=terms.mean("kl"))
        self.reference_state = (state,)
        self.tokens += int(batch.attention_mask.sum())
        self.metrics = summarize(self.rollouts) | update_metrics(batch, terms, x) | self.performance(batch, clock)
        self.progress = advance(self.experiment, self.progress, self.metrics | {"batch/rollouts": len(self.rollouts)})
        self.trainer.should_stop = self.rl_step >= self.total_steps or self.out_of_time()

    def roll_out(self, tasks: Sequence[Task]) -> list[Rollout]:
        """The step's episodes, sampled from the policy as it is now."""
        x = self.x
        return collect(
            self.policy,
            tasks,
            generate=x.generation.engine,
            environment=x.environment,
            group_size=x.batch.group_size,
            seed=x.seed,
            step=self.rl_step,
            temperature=x.generation.temperature,
            max_new_tokens=x.generation.max_new_tokens,
        )

    def with_logprobs(self, batch: Batch) -> Batch:
        """Old and reference log-probs, where the update needs them.

        With one epoch of one minibatch the old policy is the current one, so "old" is its detached value and costs nothing.
        """
        x = self.x
        if x.algorithm.epochs * x.algorithm.minibatches > 1:
            with torch.no_grad():
                batch = batch._replace(logprobs_old=self.score(self.model, batch))
        if x.kl.active:
            with self.reference.model(self.reference_state[0], self.model) as model, torch.no_grad():
                batch = batch._replace(logprobs_ref=self.score(model, batch))
        return batch

    def score(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Log-probs [B, T] of a batch, one micro-batch at a time."""
        out = torch.zeros_like(batch.logprobs_sampler)
        for rows in micro_batches(batch, self.x.trainer.micro_batch_tokens):
            part = select(batch, rows)
            logprobs = score(model, part.ids, part.response_mask, temperature=self.temperature).logprobs
            out[rows, : part.ids.shape[1]] = logprobs.to(out.dtype)
        return out

    def update(self, minibatch: Batch, terms: UpdateTerms) -> None:
        """One optimiser step. Micro-batches only sum; weights of the minibatch are fixed before it is split."""
        x = self.x
        optimizer: Any = self.optimizers()
        if not self.has_signal(minibatch):
            terms.skip("no_signal")
            return
        for group in optimizer.param_groups if "lr" in hyperparameters(x.optimizer) else ():
            group["lr"] = hyperparameters(x.optimizer)["lr"]
        optimizer.zero_grad()
        for rows in micro_batches(minibatch, x.trainer.micro_batch_tokens):
            part = select(minibatch, rows)
            scores = score(self.model, part.ids, part.response_mask, temperature=self.temperature)
            loss, parts = surrogate(part, scores, x.algorithm, x.kl)
            self.manual_backward(loss)
            terms.add(part, loss, scores.logprobs, scores.entropy, parts)
        norm = torch.nn.utils.clip_grad_norm_(self.trained_parameters(), x.trainer.max_grad_norm)
        if torch.isfinite(norm):
            optimizer.step()
            terms.stepped(float(norm), optimizer.param_groups[0]["lr"])
        else:
            terms.skip("nonfinite")

    def has_signal(self, batch: Batch) -> bool:
        """False where every term of the loss is constant: no advantage and no KL. Stepping would only replay old momentum."""
        return self.x.kl.active or batch.advantages is None or bool(batch.advantages.any())

    @property
    def rl_step(self) -> int:
        """RL steps done."""
        return self.progress.step

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

    # ------------------------------------------------------------------------------------------------ Lightning

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.x.optimizer(self.trained_parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {f"model.{name}" for name, p in self.model.named_parameters() if p.requires_grad}
        if len(trained) < sum(1 for _ in self.model.parameters()):  # LoRA: the base comes from model.path
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}
        checkpoint["rlkit"] = {
            "rl_step": self.rl_step,
            "progress": self.progress._asdict(),
            "tokens": self.tokens,
            "stream": list(self.stream),
            "reference": self.reference.save(self.reference_state[0]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["rlkit"]
        self.progress, self.tokens, self.stream = Progress(**state["progress"]), state["tokens"], StreamState(*state["stream"])
        self.reference_state = (self.reference.load(self.reference_state[0], self.model, state.get("reference", {})),)


class Clock:
    """Seconds of the named parts of a step."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a block, device work included."""
        begun = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.parts[name] = time.perf_counter() - begun

    def total(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.started


def peak_memory(device: torch.device) -> float:
    """Peak memory in GiB: of the device on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)
