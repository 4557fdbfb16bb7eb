"""rlkit: reinforcement learning of language models on multi-turn, tool-using tasks.

    x = rlkit.experiment("algorithm=dapo", "kl=none", reward=my_reward, trainer__steps=10)
    run = rlkit.train(x)

Single parts are in namespaces: `rlkit.functional.k3`, `rlkit.rewards.numeric`,
`rlkit.references.ema`. Nothing is imported before it is asked for. The notebooks' functions
(`rlkit.notebook`) can be imported from here too, and are not listed.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_HOMES = {
    "rlkit.types": (
        "Batch",
        "Controller",
        "Engine",
        "Environment",
        "Generation",
        "Message",
        "Policy",
        "Reference",
        "Rollout",
        "SamplingParams",
        "Session",
        "Splits",
        "Step",
        "Task",
        "ToolCall",
        "ToolResult",
    ),
    "rlkit.errors": ("ConfigError", "DataError", "RLKitError"),
    "rlkit.algorithm": ("KL", "Algorithm"),
    "rlkit.rewards": ("Reward", "Term", "score"),
    "rlkit.models": ("load_policy",),
    "rlkit.episodes": ("assemble", "collect"),
    "rlkit.episodes.episode": ("play",),
    "rlkit.episodes.evaluation": ("greedy_accuracy", "sampled_accuracy"),
    "rlkit.training.experiment": ("Experiment",),
    "rlkit.episodes.stream": ("StreamState",),
    "rlkit.config.problems.rows": ("load_tasks",),
    "rlkit.system.device": ("autocast",),
    "rlkit.training.groups": ("experience",),
    "rlkit.training.learner": ("Learner",),
    "rlkit.training.run": ("ready",),
    "rlkit.config.experiment": ("experiment",),
    "rlkit.runs.python": ("Run", "steps", "train"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_NAMESPACES = {
    "references": "rlkit.training.references",
    "schedules": "rlkit.training.schedules",
} | {
    name: f"rlkit.{name}"
    for name in (
        "algorithm",
        "engines",
        "environments",
        "episodes",
        "functional",
        "models",
        "notebook",
        "rewards",
        "tasks",
    )
}

__all__ = sorted([*_HOME, *_NAMESPACES])


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return importlib.import_module(_NAMESPACES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"rlkit.{name}") is None:
        notebook = importlib.import_module("rlkit.notebook")
        if name in dir(notebook):
            return getattr(notebook, name)
    raise AttributeError(f"module 'rlkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
