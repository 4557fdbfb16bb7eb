"""Find the load of one step of a composed run. Of the model, only the config is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlkit.errors import ConfigError, RLKitError
from rlkit.extras.forecast.costs import SHARE
from rlkit.extras.forecast.roofline import KNOWN, Load, Shape, read_shape
from rlkit.training.experiment import Experiment

PROMPT = 200  # assumed tokens of a prompt, if neither the rows nor the user give them


def find_shape(x: Experiment) -> Shape:
    """Find the sizes of the run's model. For the models of conf/model nothing is fetched.

    Raises: ConfigError for a model without a path.
    """
    from rlkit.models.load import pretrained_config

    path = x.model.path
    if path is None:
        raise ConfigError("check.device needs the sizes of the model: name one by model.path")
    return KNOWN.get(path) or read_shape(pretrained_config(path, **x.model.hub).get_text_config())


def measure_load(
    x: Experiment, config: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Load, str]:
    """Return the load of a step of the run, and a description of its lengths."""
    a = x.algorithm
    limit = x.generation.max_new_tokens
    rank = x.model.rank
    share = float(given.get("reply_share", SHARE))
    counted = None if "prompt_tokens" in given else prompt_tokens(x)
    prompt = int(given.get("prompt_tokens", counted or PROMPT))
    environment = config.get("environment") or {}
    engine = (config.get("generation") or {}).get("engine") or {}
    updates = a.epochs * a.minibatches
    load = Load(
        x.batch.prompts,
        x.batch.group_size,
        prompt,
        max(1, round(share * limit)),
        limit,
        int(given.get("turns", 2 if has_turns(environment) else 1)),
        rank,
        x.model.gradient_checkpointing is True,  # for auto see settle_checkpointing
        x.trainer.micro_batch_tokens,
        engine.get("max_rows") or 256,
        engine.get("max_cached_tokens"),
        scoring=x.needs_reference + (updates > 1 or x.kl.in_reward or a.critic.active),
        copies=int(x.needs_reference and not rank),
        updates=updates,
        epochs=a.epochs,
        steps=x.trainer.steps,
    )
    source = "given" if "prompt_tokens" in given else "assumed"
    if counted:
        source = "counted"
    replies = f"replies of {load.reply} ({share:.0%} of generation.max_new_tokens={limit})"
    return load, f"prompts of {prompt} tokens ({source}), {replies}, {load.turns} a rollout"


def list_uncounted(x: Experiment, phases: int) -> list[str]:
    """List the parts of a run that the forecast leaves out."""
    a = x.algorithm
    parts = {
        "the teacher": x.needs_teacher,
        "the trunk of a separate critic": a.critic.active and a.critic.model == "separate",
        "that demonstrations are not sampled": a.episodes is not None,
        "more than one device": x.trainer.devices * x.trainer.nodes > 1,
        "the phases after the first": phases > 1,
    }
    return [name for name, there in parts.items() if there]


def has_turns(environment: Mapping[str, Any]) -> bool:
    """Return whether an episode can have several replies. Of environment=by_task, one environment
    with several replies is enough."""
    every = [environment, *(environment.get("environments") or {}).values()]
    return any((own.get("max_turns") or own.get("max_steps") or 1) > 1 for own in every)


def prompt_tokens(x: Experiment) -> int | None:
    """Return the mean number of tokens of the first prompts, with tools and template. Return None
    if the rows or the tokenizer are not on this machine."""
    from rlkit.environments import find_environment
    from rlkit.episodes.episode import read_opening
    from rlkit.models.chat import encode_prompt, make_renderer
    from rlkit.models.load import pretrained_tokenizer

    if x.model.path is None:
        return None
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # an estimate must not download a data set
    try:
        renderer = make_renderer(pretrained_tokenizer(x.model.path, local_files_only=True))
        openings = [
            read_opening(task, find_environment(x.environment, task))
            for task in x.task(split="train")[:32]
        ]
        lengths = [len(encode_prompt(renderer, own.prompt, own.schemas)) for own in openings]
    except (RLKitError, OSError):
        return None
    return round(sum(lengths) / len(lengths)) if lengths else None
