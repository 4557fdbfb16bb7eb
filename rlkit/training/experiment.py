"""Describe an experiment as plain data. An experiment is made from a config, or built by hand in a
notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rlkit.algorithm import KL, Algorithm, asks_for
from rlkit.episodes.samplers import TaskSampler
from rlkit.episodes.stream import UNIFORM
from rlkit.functional import automatic_correction, no_correction, token_correction
from rlkit.models import LoRA
from rlkit.rewards import Reward
from rlkit.sandbox import Sandbox
from rlkit.tasks import make_tasks
from rlkit.training.schedules import Schedule, list_phases, resolve_schedules, start
from rlkit.training.teachers import Teacher
from rlkit.types import (
    Engine,
    Environment,
    Policy,
    Reference,
    SamplingParams,
    Split,
    Task,
    ToolParser,
    bound,
    plain,
    ranges,
    reaches,
    safe,
)


@ranges(prompts=(1, None), group_size=(1, None))
class BatchSize(NamedTuple):
    """Set the size of an RL step: prompts × group_size rollouts."""

    prompts: int
    group_size: int


@ranges(temperature=(0, None), max_new_tokens=(1, None), admission_rounds=(1, None))
class Sampling(NamedTuple):
    """Set how replies are sampled. Training must sample from the full distribution. Therefore a
    training run refuses a `top_p` below 1 and a `top_k` above 0."""

    engine: Engine
    temperature: float = 1.0
    max_new_tokens: int = 256
    max_thinking_tokens: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    # when an episode continues to decode after an answer from outside (SamplingParams)
    admission: Literal["rounds", "barrier", "free"] = "rounds"
    admission_rounds: int = 16
    # `kernel` and `cache` of the cached engine (`Cached`), with its choices
    kernel: Literal["auto", "eager", "fused"] = "auto"
    cache: Literal["gather", "varlen"] = "gather"

    @property
    def params(self) -> dict[str, Any]:
        """Return the fields of SamplingParams: all fields except the engine, its kernel and its
        cache."""
        own = self._asdict()
        return {name: own[name] for name in SamplingParams._fields}


@safe("k")
@ranges(
    n=(0, None),
    every=(0, None),
    samples=(0, None),
    temperature=(0, None),
    curve_temperature=(0, None),
    max_new_tokens=(1, None),
    stop_at=(0, 1),
)
class Evaluation(NamedTuple):
    """Set how the policy is evaluated, and by which verifier. Validation tasks are evaluated during
    training. Test tasks are evaluated before and after training."""

    reward: Reward
    n: int = 256  # number of tasks of each of the two splits; 0 evaluates nothing
    every: int = 0  # RL steps between evaluations on validation tasks; 0: no such evaluation
    samples: int = 8  # sampled replies per task in `rlkit evaluate`, besides the greedy one
    k: Sequence[int] = (1, 4, 8)  # the values of k in pass@k
    temperature: float = 1.0  # of the sampled replies
    max_new_tokens: int | None = None  # None: as in training
    seed: int = 0  # of the sampled replies
    # temperature of a run's own evaluations, with one reply per task; 0 is greedy
    curve_temperature: float = 0.0
    stop_at: float | None = None  # training ends when validation accuracy reaches this value

    def is_reached(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the validation accuracy in a step's metrics reaches `stop_at`."""
        return self.stop_at is not None and metrics.get("eval/accuracy", -1.0) >= self.stop_at


@ranges(
    steps=(1, None),
    micro_batch_tokens=(1, None),
    max_grad_norm=(1e-8, None),
    max_time=(0, None),
    threads=(1, None),
    max_nonfinite=(1, None),
    devices=(1, None),
    nodes=(1, None),
    timeout=(0.001, None),
    max_step_time=(0.001, None),
)
class TrainerSettings(NamedTuple):
    """Set the length of training, its devices, and its limits."""

    steps: int
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    micro_batch_tokens: int = 16384
    max_grad_norm: float = 1.0
    max_time: float | None = None  # minutes of training; None: no limit
    threads: int | None = None  # of torch on the CPU; None: by the model's size and the cores
    strategy: Literal["single", "ddp", "fsdp"] = "single"
    devices: int = 1  # processes on each node; every process has a device of its own
    nodes: int = 1
    timeout: float = 1800.0  # the most seconds that a rank waits for the other ranks
    max_step_time: float | None = 60.0  # the most minutes without progress; None: no limit
    # the run stops after this many consecutive updates with a loss or gradient that is not finite
    max_nonfinite: int = 5
    # whether a SLURM job is queued again after a signal has ended it and its state is saved
    requeue: bool = False


@safe("device")
@ranges(threads=(1, None))
class SamplerProcess(NamedTuple):
    """Set the device and threads of the second process of asynchrony=overlap. If this process has
    as many threads as the trainer, its samples are the same as with asynchrony=lag, bit for bit."""

    threads: int = 1  # of torch on the CPU
    device: str = "auto"  # of torch; auto: the trainer's, or the second GPU if there are several


@ranges(staleness=(0, None))
class Asynchrony(NamedTuple):
    """Set how far sampling runs ahead of training.

    none    every RL step first samples with the current weights and then trains
    lag     step s samples with the weights after step `s - staleness`, or with the first weights;
            all work happens in one process and is repeatable
    overlap the same as lag, bit for bit, but a second process samples while this process updates
    """

    mode: Literal["none", "lag", "overlap"] = "none"
    staleness: int = 0  # RL steps
    sampler: SamplerProcess = SamplerProcess()


@ranges(groups=(0, None), staleness=(0, None))
class Reuse(NamedTuple):
    """Keep groups and learn from them again, in place of groups whose rewards are all equal.

    Source: TRL's replay buffer for groups without variance (grpo_with_replay_buffer). Here the
      staleness is limited, and algorithm/correction corrects for it.
    """

    groups: int = 0  # the most groups to keep; 0 keeps none
    # greatest age of a kept group's sampling weights, in RL steps; 0 uses no kept group
    staleness: int = 0

    @property
    def active(self) -> bool:
        """Return whether kept groups are ever used again."""
        return self.groups > 0 and self.staleness > 0


@dataclass(frozen=True)
class ModelSpec:
    """Hold a function that loads a policy, and the facts known before the policy is loaded. A value
    of None means that the fact is not known."""

    load: Callable[..., Policy]  # (device=…) → policy
    path: str | None = None  # folder or hub id read by `load`
    revision: str | None = None
    trust_remote_code: bool | None = None
    lora: LoRA | None = None
    interruption: str | None = None
    gradient_checkpointing: bool | Literal["auto"] | None = None
    origin: str | None = None  # where the weights of an already loaded policy come from
    # suggested numbers for other config groups
    suggests: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, **settings: Any) -> Policy:
        """Load the policy and return it. The keyword `device` names the device of its weights."""
        return self.load(**settings)

    @property
    def rank(self) -> int:
        """Return the rank of the LoRA adapters, or 0 if all weights are trained."""
        return self.lora.rank if self.lora else 0

    @property
    def hub(self) -> dict[str, Any]:
        """Return the settings for a download from the hub, without the path."""
        return {"revision": self.revision, "trust_remote_code": bool(self.trust_remote_code)}


# Keywords of a policy's loading function that are also read elsewhere in a run.
READ = ("path", "revision", "trust_remote_code", "lora", "interruption", "gradient_checkpointing")


def model_spec(load: Callable[..., Policy], suggests: Mapping[str, Any] = {}) -> ModelSpec:
    """Make the ModelSpec of a function that loads a policy. The facts are taken from the keywords
    that a config has bound to this function."""
    if isinstance(load, ModelSpec):
        return replace(load, suggests=suggests)
    known = {name: bound(load).get(name) for name in READ}
    return ModelSpec(load, suggests=suggests, **known)


@dataclass(frozen=True)
class TaskSource:
    """Hold a function that loads tasks, the sampler that chooses the next problem, and the settings
    for learning from groups again."""

    # (split=train, validation or test) → the tasks of this split; no problem is in two splits
    load: Callable[..., Sequence[Task]]
    sampler: TaskSampler = UNIFORM  # chooses the next problem
    # chooses the groups to learn from again
    reuse: Reuse = Reuse()  # noqa: RUF009  (a NamedTuple: immutable)

    def __call__(self, *, split: Split, **settings: Any) -> Sequence[Task]:
        """Load the tasks of a split. `settings`, for example max_samples, are passed to `load`.

        Raises: ConfigError, and DataError if `load` returns anything other than tasks.
        """
        return make_tasks(self.load(split=split, **settings), split)


@safe("name", "task", "environment", "model")
@ranges(n=(1, None), num_return_sequences=(1, None), max_steps=(1, None))
class RolloutRun(NamedTuple):
    """Describe a run that plays episodes without training: the config groups of an episode, and the
    number of episodes."""

    name: str
    seed: int
    n: int
    task: TaskSource
    environment: Environment | Callable[[Task], Environment]
    model: ModelSpec
    generation: Sampling
    reward: Reward
    trainer: TrainerSettings
    num_return_sequences: int = 1
    max_steps: int | None = None  # most replies of an episode; None: the environment's own limit
    split: Split = "test"
    format: Literal["jsonl.gz", "jsonl"] = "jsonl.gz"  # of the file of rollouts
    sandbox: Sandbox = Sandbox()  # parts that run code refer to it (`${sandbox}`)


@reaches(tools="import")
@safe("model", "system_prompt")
@ranges(max_turns=(1, None), max_calls=(1, None), max_chars=(1, None), timeout=(0.001, None))
class AgentRun(NamedTuple):
    """Describe a question to answer with tools: the model that answers the question, and the limits
    of the answer."""

    tools: Sequence[str]  # names of shipped tools, or module.function
    model: ModelSpec
    generation: Sampling
    parse_calls: ToolParser
    trainer: TrainerSettings
    system_prompt: str | None = None
    max_turns: int = 10  # the most replies
    max_calls: int = 8  # the most tool calls answered in one reply
    max_chars: int = 2000  # the most characters of a call's result that the policy reads
    timeout: float | None = 30.0  # the most seconds of a call; None: no limit
    seed: int = 0
    sandbox: Sandbox = Sandbox()  # of the python tool


@reaches(resume="path")
@safe("name", "task", "environment", "model", "optimizer", "logger", "callbacks")
class Experiment(NamedTuple):
    """Hold all settings of a run, as functions and numbers. There is one field per config group."""

    name: str
    seed: int
    batch: BatchSize
    task: TaskSource
    environment: Environment | Callable[[Task], Environment]
    model: ModelSpec
    generation: Sampling
    reward: Reward
    algorithm: Algorithm
    kl: KL
    reference: Reference
    optimizer: Callable[..., Any]  # (parameters) → torch optimizer
    trainer: TrainerSettings
    evaluation: Evaluation
    sandbox: Sandbox = Sandbox()
    schedule: Schedule = Schedule()
    asynchrony: Asynchrony = Asynchrony()
    teacher: Teacher = Teacher()
    logger: Mapping[str, Callable[..., Any]] = {}  # name → (run folder, RL step) → Lightning logger
    callbacks: Mapping[str, Callable[..., Any]] = {}  # name → (run folder) → Lightning callback
    resume: str = "never"  # never, auto, or a run folder
    takeover: bool = False  # whether to take over the run folder from a process that works in it

    def held_out(self, temperature: float) -> dict[str, Any]:
        """Return the arguments for playing and scoring an evaluation at this temperature. The
        verifier and the limit of tokens come from `evaluation`. All other settings are as in
        training."""
        limit = self.evaluation.max_new_tokens or self.generation.max_new_tokens
        sampling = self.generation._replace(temperature=temperature, max_new_tokens=limit)
        parts = {
            "reward": self.evaluation.reward,
            "engine": sampling.engine,
            "environment": self.environment,
        }
        return parts | sampling.params

    @property
    def sampler(self) -> TaskSampler:
        """Return the function that chooses the next problem (task.sampler)."""
        return self.task.sampler

    @property
    def reuse(self) -> Reuse:
        """Return the settings for learning from groups again (task.reuse)."""
        return self.task.reuse

    @property
    def staleness(self) -> int:
        """Return the greatest possible age of a group in RL steps, at the time when the policy
        learns from the group. A group has the age 0 if it was sampled with the policy's present
        weights. Each RL step after the weights of the sampling adds 1 to the age."""
        return max(self.asynchrony.staleness, self.reuse.staleness if self.reuse.active else 0)

    @property
    def needs_reference(self) -> bool:
        """Return whether any phase needs the reference, either from its start or after a schedule
        raises the coefficient of the KL."""
        return any(
            x.kl.active or (x.kl.estimator is not None and "kl.coef" in x.schedule.paths)
            for x in list_phases(self).values()
        )

    @property
    def needs_teacher(self) -> bool:
        """Return whether any phase has a stream that uses the teacher."""
        return any("teacher" in x.algorithm.streams for x in list_phases(self).values())


def settle_correction(x: Experiment, *, exact: bool) -> Experiment:
    """Replace `algorithm/correction=auto` by the off-policy correction for this run, in the
    experiment and all of its phases.

    There is no correction if sampling policy and old policy are the same. This is so if the check
    before the first step found `exact` log-probs in float32, and every step trains the weights that
    have sampled its rollouts. There is also no correction if the loss's own ratio is already
    relative to the sampling policy. In all other cases the correction is each token's factor
    π_old / π_sampler, truncated at 2.

    Args:
      exact: whether the check before the first step found that the engine gives exactly the
        trainer's log-probs.
    """

    def settled(algorithm: Algorithm) -> Algorithm:
        if not _is_automatic(algorithm):
            return algorithm
        return algorithm._replace(
            correction=_settle_correction(algorithm, exact=exact, staleness=x.staleness)[0]
        )

    later = {
        name: phase._replace(algorithm=settled(phase.algorithm))
        for name, phase in x.schedule.phases.items()
    }
    return x._replace(algorithm=settled(x.algorithm), schedule=x.schedule._replace(phases=later))


def describe_correction(x: Experiment, *, exact: bool) -> str:
    """Return a line that names the correction chosen for `algorithm/correction=auto`. The line is
    empty if no phase uses auto."""
    automatic = [
        phase.algorithm for phase in list_phases(x).values() if _is_automatic(phase.algorithm)
    ]
    said = dict.fromkeys(
        _settle_correction(algorithm, exact=exact, staleness=x.staleness)[1]
        for algorithm in automatic
    )
    return f"correction: {'; '.join(said)}" if said else ""


def describe_kl(x: Experiment) -> str:
    """Describe the KL at the start of an experiment, for example as `k3 × 0.05 in the loss`, or as
    `none`."""
    if not x.needs_reference:
        return "none"
    coef = resolve_schedules(x, start(x)).kl.coef
    places = {
        "loss": "the loss",
        "reward": "the reward",
        "reward_sequence": "the reward of the episode",
    }
    return f"{x.kl.name} × {coef:g} in {places[x.kl.placement]}"


def _settle_correction(algorithm: Algorithm, *, exact: bool, staleness: int) -> tuple[Any, str]:
    """Return the correction for `algorithm/correction=auto`, and the reason for it."""
    if algorithm.old == "sampler" or asks_for(algorithm.policy_loss, "logprobs_sampler"):
        return no_correction, "none (auto: the ratio of the loss is to the sampler itself)"
    if staleness:
        return (
            token_correction,
            (
                f"token_truncate, cap 2 (auto: replies are sampled by weights up to {staleness} RL"
                " steps old)"
            ),
        )
    if exact:
        return (
            no_correction,
            "none (auto: in float32 the engine gives the log-probs of the trainer)",
        )
    return (
        token_correction,
        (
            "token_truncate, cap 2 (auto: the engine's log-probs are rounded differently from the"
            " trainer's)"
        ),
    )


def _is_automatic(algorithm: Algorithm) -> bool:
    return plain(algorithm.correction) is automatic_correction
