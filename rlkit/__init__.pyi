"""The names of `rlkit`, for editors and type checkers, and the only list of them: `__init__.py`
reads this file. The signature of `experiment` names the groups, so that they complete."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import algorithm as algorithm
from rlkit import engines as engines
from rlkit import environments as environments
from rlkit import episodes as episodes
from rlkit import functional as functional
from rlkit import models as models
from rlkit import notebook as notebook
from rlkit import rewards as rewards
from rlkit import tasks as tasks
from rlkit.algorithm import KL as KL
from rlkit.algorithm import Algorithm as Algorithm
from rlkit.config.problems.rows import load_tasks as load_tasks
from rlkit.episodes import assemble as assemble
from rlkit.episodes import collect as collect
from rlkit.episodes.episode import play as play
from rlkit.episodes.evaluation import greedy_accuracy as greedy_accuracy
from rlkit.episodes.evaluation import sampled_accuracy as sampled_accuracy
from rlkit.episodes.stream import StreamState as StreamState
from rlkit.errors import ConfigError as ConfigError
from rlkit.errors import DataError as DataError
from rlkit.errors import RLKitError as RLKitError
from rlkit.models import load_policy as load_policy
from rlkit.rewards import Reward as Reward
from rlkit.rewards import Term as Term
from rlkit.rewards import score as score
from rlkit.runs.python import Run as Run
from rlkit.runs.python import steps as steps
from rlkit.runs.python import train as train
from rlkit.system.device import autocast as autocast
from rlkit.training import references as references
from rlkit.training import schedules as schedules
from rlkit.training.experiment import Experiment as Experiment
from rlkit.training.groups import experience as experience
from rlkit.training.learner import Learner as Learner
from rlkit.training.run import ready as ready
from rlkit.types import Batch as Batch
from rlkit.types import Controller as Controller
from rlkit.types import Engine as Engine
from rlkit.types import Environment as Environment
from rlkit.types import Generation as Generation
from rlkit.types import Message as Message
from rlkit.types import Policy as Policy
from rlkit.types import Reference as Reference
from rlkit.types import Rollout as Rollout
from rlkit.types import SamplingParams as SamplingParams
from rlkit.types import Session as Session
from rlkit.types import Splits as Splits
from rlkit.types import Step as Step
from rlkit.types import Task as Task
from rlkit.types import ToolCall as ToolCall
from rlkit.types import ToolResult as ToolResult

def experiment(
    *overrides: str,
    config_dir: str | Path | None = None,
    name: str = ...,
    seed: int = ...,
    batch: Mapping[str, int] = ...,
    task: str | Sequence[Any] | Splits | Mapping[str, Any] | Callable[..., Sequence[Task]] = ...,
    environment: str | Environment | Callable[[Task], Environment] = ...,
    model: str | Policy | Callable[..., Policy] = ...,
    generation: str | Mapping[str, Any] = ...,
    reward: str | Reward | Term | Callable[..., Any] | Sequence[Any] | Mapping[str, Any] = ...,
    algorithm: str | Algorithm = ...,
    kl: str | KL = ...,
    reference: str | Reference = ...,
    optimizer: str | Callable[..., Any] = ...,
    trainer: str | Mapping[str, Any] = ...,
    evaluation: str | Mapping[str, Any] = ...,
    sandbox: str | Mapping[str, Any] = ...,
    schedule: str | Mapping[str, Any] = ...,
    asynchrony: str | Mapping[str, Any] = ...,
    teacher: str | Mapping[str, Any] = ...,
    logger: str | Sequence[str] | Mapping[str, Any] = ...,
    callbacks: str | Sequence[str] | Mapping[str, Any] = ...,
    resume: str = ...,
    takeover: bool = ...,
    experiment: str = ...,
    debug: str = ...,
    **keywords: Any,
) -> Experiment:
    """Compose an experiment from the options of conf/, as `rlkit train` does, and check it before a
    model is loaded.

        rlkit.experiment("algorithm=dapo", "kl=none", reward=my_reward, trainer__steps=10)
    """

def __getattr__(name: str) -> Any: ...  # the notebooks' functions
