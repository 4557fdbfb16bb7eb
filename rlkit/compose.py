"""From a config to an Experiment: composed by Hydra, checked before anything heavy is loaded, built from plain functions.

Order: overrides → composed config → every key checked (rlkit.schema) → functions built → combinations validated → dry run on fake
data. Each stage reports all of its problems at once, and none of them imports more than torch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit.errors import ConfigError, nearest
from rlkit.schema import build, check

if TYPE_CHECKING:  # torch is imported with the parts that need it, not before
    from omegaconf import DictConfig

    from rlkit.settings import Experiment


def conf_dir() -> Path:
    """The folder of the shipped options: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


# ----------------------------------------------------------------------------------------------------- composing


class Composed(NamedTuple):
    """A composed config in plain containers, the overrides that give it to Hydra, and Hydra's own object, its settings included."""

    config: dict[str, Any]
    overrides: list[str]
    full: DictConfig


def compose(overrides: Sequence[str], *, entry: str = "train", config_dir: str | None = None) -> Composed:
    """Composes an entry config and refuses it, with all problems in one message, unless it can be built.

    Args:
      overrides: as on the command line. Keys that a part's signature knows need no `+`.
      entry: train, evaluate or rollout.
      config_dir: a folder of the user's own options.
    Raises: ConfigError.
    """
    import logging

    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    logging.getLogger("hydra").setLevel(logging.ERROR)
    search = searchpath(config_dir)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        problems, accepted = _check_overrides(overrides, search)
        problems += _clashes(config_dir)
        try:
            full, accepted = _load(entry, search, accepted)
            plain = _plain(full)
        except ConfigError as error:
            raise ConfigError("\n".join([*problems, str(error)])) from error
    problems += check(plain) or range_problems(plain)
    problems += phase_problems(plain, overrides)
    if problems:
        raise ConfigError("\n".join(problems))
    return Composed(plain, accepted, full)


def range_problems(node: Any, path: str = "") -> list[str]:
    """Numbers below what their part can work with, where it would say so only in the middle of a run."""
    from rlkit.settings import LEAST

    items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    least = LEAST.get(str(node.get("_target_")), {}) if isinstance(node, dict) else {}
    problems = []
    for key, value in items:
        where = f"{path}[{key}]" if isinstance(node, list) else f"{path}.{key}" if path else str(key)
        if key in least and isinstance(value, int | float) and value < least[key]:
            problems.append(f"{where}={value}: must be at least {least[key]:g}")
        problems += range_problems(value, where)
    return problems


def keys(overrides: Sequence[str], *, entry: str = "train", config_dir: str | None = None) -> list[str]:
    """All dotted keys of a composed config that a command line may set; it is not checked. Raises ConfigError where it does not compose."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from rlkit.runs import flatten

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        full, _ = _load(entry, searchpath(config_dir), overrides)
    plain: Any = OmegaConf.to_container(full, resolve=False)
    return [key for key in flatten(plain) if not key.startswith("hydra.") and not key.endswith(("_partial_", "_target_"))]


def phase_problems(config: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Overrides of a group of the whole run that every phase replaces: they would change nothing, silently."""
    phases = (config.get("schedule") or {}).get("phases") or {}
    out = []
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        group = key.partition("/")[0].partition(".")[0]
        if "@" in key or not phases or not all(isinstance(phase, dict) and phase.get(group) is not None for phase in phases.values()):
            continue
        places = [f"schedule.phases.{name}.{key.replace('/', '.')}" for name in phases]
        is_option = "/" in key or key == group  # an option is chosen at its new place, group@place=option
        meant = [f"{key}@{place}={value}" if is_option else f"{place}={value}" for place in places]
        out.append(f"{text}: changes nothing, every phase of the schedule has its own {group}; write {' or '.join(meant)}")
    return out


def searchpath(config_dir: str | None) -> list[str]:
    """The override that makes Hydra look for options in a user's folder too."""
    return [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []


def _clashes(config_dir: str | None) -> list[str]:
    """Options of a user's folder that Hydra would silently pass over for a shipped one of the same name."""
    folder = Path(config_dir) if config_dir else None
    files = sorted(folder.rglob("*.yaml")) if folder else []
    hidden = [f for f in files if folder and (conf_dir() / f.relative_to(folder)).exists()]
    return [f"{f}: an option of this name ships with rlkit and would be taken instead; rename the file" for f in hidden]


def _load(entry: str, search: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Hydra's config, its own node included, and the overrides that give it; whatever goes wrong is one ConfigError.

    Hydra composes the groups; the values are set after that, as it does itself. A key that the YAML does not hold may still be one
    that a signature knows: it is added, and the check decides.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    parser, groups = OverridesParser.create(), [text for text in overrides if is_group(text, search)]
    accepted = []
    try:
        full = copy.deepcopy(_composed_groups(entry, (*search, *groups), _stamp(search)))
        for text in overrides:
            if text in groups:
                accepted.append(text)
                continue
            try:
                ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides([text]), full)
            except HydraException:
                if text[0] in "+~":
                    raise
                text = f"++{text}"
                ConfigLoaderImpl._apply_overrides_to_config(parser.parse_overrides([text]), full)
            accepted.append(text)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        absent = re.match(r"Could not override '(\w+)'", str(error))  # a whole group: adding it, as Hydra proposes, would not help
        raise ConfigError(f"{absent[1]}: rlkit {entry} has no such group" if absent else one_sentence(error)) from error
    full.hydra.overrides.task = [text for text in accepted if not text.startswith("hydra")]
    full.hydra.job.override_dirname = ",".join(sorted(full.hydra.overrides.task))
    full.hydra.runtime.cwd = os.getcwd()
    return full, accepted


@functools.lru_cache(maxsize=64)
def _composed_groups(entry: str, overrides: tuple[str, ...], stamp: object) -> DictConfig:
    """Hydra's composition of options, once for all configs that differ in values only. `stamp` changes with the files."""
    import hydra

    return hydra.compose(entry, overrides=list(overrides), return_hydra_config=True)


def _stamp(search: Sequence[str]) -> object:
    """Changes whenever an option is written, also in a notebook that edits its own."""
    folders = [conf_dir(), *(Path(folder) for text in search for folder in re.findall(r"file://([^],]+)", text))]
    return tuple((str(f), f.stat().st_mtime_ns) for folder in folders for f in folder.rglob("*.yaml"))


def _plain(full: DictConfig) -> dict[str, Any]:
    """The config without Hydra's own node in plain containers, every reference to another value resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def plain(key: Any) -> Any:
        value = "???" if OmegaConf.is_missing(full, key) else full[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    try:
        return {str(key): plain(key) for key in full if key != "hydra"}
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_sentence(error)) from error


def is_group(override: str, search: Sequence[str]) -> bool:
    """Whether an override chooses an option, or sets something of Hydra's own, which may decide where options are found."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType

    key, _, value = override.lstrip("+~").partition("=")
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    options = hydra.config_loader.get_group_options(key.partition("@")[0], ObjectType.CONFIG, overrides=list(search))
    return key.partition("/")[0].partition(".")[0] == "hydra" or (bool(options) and not value.startswith("{"))


def _check_overrides(overrides: Sequence[str], search: Sequence[str]) -> tuple[list[str], list[str]]:
    """Problems of the overrides themselves, and the overrides that can be composed, values made to add where they must."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    loader = hydra.config_loader
    parser = OverridesParser.create(config_loader=loader)
    elsewhere = bool(search) or any(text.startswith("hydra.searchpath=") for text in overrides)  # options that are looked for later
    problems, accepted = [], []
    for given in overrides:
        try:
            override, text = parse_override(parser, given)
        except HydraException as error:
            problems.append(f"'{given}' cannot be read: {one_sentence(error)}")
            continue
        group = override.key_or_group
        options = loader.get_group_options(group, ObjectType.CONFIG)
        chosen = override.value() if options and not override.is_sweep_override() else []
        unknown = [c for c in (chosen if isinstance(chosen, list) else [chosen]) if c not in options]
        if override.is_sweep_override():
            problems.append(f"{text}: several values are a sweep; run it with -m")
        elif unknown and not elsewhere:
            hint = nearest(str(unknown[0]), options)
            problems.append(f"{text}: no such option.{hint} Options of {group}: {', '.join(sorted(options))}")
        else:
            accepted.append(text)
    return problems, accepted


def parse_override(parser: Any, text: str) -> tuple[Any, str]:
    """An override, and its text in Hydra's grammar: a condition such as `reward/mean > 0.8 for 3` gets the quotes that the shell took."""
    from hydra.errors import HydraException

    try:
        return parser.parse_overrides([text])[0], text
    except HydraException:
        key, _, value = text.partition("=")
        if not value or value[0] in "[{'\"":  # a broken list or mapping is no text
            raise
        quoted = f"{key}='{value}'"
        return parser.parse_overrides([quoted])[0], quoted


def one_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key", "object_type", "Config search path", "provider")))


def validate(x: Experiment) -> list[str]:
    """Combinations that cannot run, or that would silently do nothing, as sentences."""
    return _check_numbers(x) + _check_evaluation(x) + _check_groups(x) + _check_kl(x) + _check_critic(x) + _check_quantities(x)


def _check_numbers(x: Experiment) -> list[str]:
    from rlkit.settings import thinking_problems

    rollouts = x.batch.prompts * x.batch.group_size
    a, critic = x.algorithm, x.algorithm.critic
    counts: dict[str, float] = {
        "batch.prompts": x.batch.prompts,
        "batch.group_size": x.batch.group_size,
        "trainer.max_nonfinite": x.trainer.max_nonfinite,
        "algorithm.epochs": a.epochs,
        "algorithm.minibatches": a.minibatches,
        "generation.max_new_tokens": x.generation.max_new_tokens,
    }
    amounts = {
        "kl.coef": x.kl.coef,
        "generation.temperature": x.generation.temperature,
        "algorithm.entropy_coef": a.entropy_coef,
        "algorithm.max_refills": a.max_refills,
        "algorithm.critic.warmup": critic.warmup,
        "algorithm.critic.coef": critic.coef,
    }
    problems = [f"{path}={value}: must be at least 1" for path, value in counts.items() if value < 1]
    problems += thinking_problems(x.generation)
    problems += [f"{path}={value}: must not be negative" for path, value in amounts.items() if isinstance(value, int | float) and value < 0]
    if a.target_kl is not None and not a.target_kl > 0:
        problems.append(f"algorithm.target_kl={a.target_kl}: must be greater than 0 nats per token; null never ends a step's updates early")
    if x.generation.temperature == 0:
        problems.append("generation.temperature=0: greedy samples of a prompt are all equal, so nothing is learned; use 1.0")
    if x.generation.top_p < 1 or x.generation.top_k > 0:
        problems.append(
            f"generation.top_p={x.generation.top_p}, generation.top_k={x.generation.top_k}: training samples from the full distribution, "
            "since ratios and KL compare full distributions and are wrong on samples of a cut one; set top_p=1 and top_k=0"
        )
    if x.trainer.max_step_time is not None and not x.trainer.max_step_time > 0:
        problems.append(f"trainer.max_step_time={x.trainer.max_step_time}: must be greater than 0 minutes; null waits for ever")
    if x.evaluation.max_time is not None and not x.evaluation.max_time > 0:
        problems.append(f"evaluation.max_time={x.evaluation.max_time}: must be greater than 0 minutes; null waits for ever")
    if x.trainer.requeue and x.resume == "never":
        problems.append("trainer.requeue: with resume=never the job that is queued again would begin anew; set resume=auto, or name a run")
    if not problems and rollouts % a.minibatches:
        problems.append(
            f"algorithm.minibatches={a.minibatches}: {x.batch.prompts} prompts × {x.batch.group_size} samples are "
            f"{rollouts} rollouts, which do not divide into that many equal parts; change it, batch.prompts or batch.group_size"
        )
    return problems


def _check_evaluation(x: Experiment) -> list[str]:
    e, problems = x.evaluation, []
    if e.every > 0 and e.n == 0:
        problems.append(f"evaluation.every={e.every}: evaluation.n=0 leaves nothing to evaluate; raise it, or set evaluation.every=0")
    if e.stop_at is not None and (e.every == 0 or e.n == 0):
        problems.append(f"evaluation.stop_at={e.stop_at}: nothing is evaluated during training; set evaluation.every and evaluation.n")
    if any(k < 1 for k in e.k):
        problems.append(f"evaluation.k={list(e.k)}: pass@k needs k of at least 1")
    return problems


def rank_problems(x: Experiment) -> list[str]:
    """Numbers of devices that cannot be, and what several ranks cannot do, as sentences."""
    t, problems = x.trainer, []
    count = t.devices * t.nodes
    for name, value in {"devices": t.devices, "nodes": t.nodes}.items():
        if value < 1:
            problems.append(f"trainer.{name}={value}: must be at least 1")
    if not t.timeout > 0:
        problems.append(f"trainer.timeout={t.timeout}: must be greater than 0 seconds")
    if count > 1 and t.strategy == "single":
        problems.append(
            f"trainer.devices={t.devices}, trainer.nodes={t.nodes}: one process uses one device; choose trainer=ddp, or trainer=fsdp for a "
            "model that one device does not hold"
        )
    if count > 1 and x.batch.prompts < count:
        problems.append(
            f"batch.prompts={x.batch.prompts}: the samples of a prompt stay on one rank, so {count} ranks need at least as many prompts; "
            "raise it, or lower trainer.devices"
        )
    if t.strategy == "fsdp" and count > 1:
        lora = x.model.keywords.get("lora") if hasattr(x.model, "keywords") else None
        own = [name for name, phase in x.schedule.phases.items() if phase.reference is not None or "reference" in phase.reset]
        if lora and lora.rank and own:
            problems.append(
                f"trainer=fsdp model.lora.rank={lora.rank} schedule.phases.{own[0]}: a phase cannot add a reference of its own "
                "to sharded adapters; choose trainer=ddp, or let the phases share the reference of the run"
            )
    return problems


def _check_groups(x: Experiment) -> list[str]:
    from rlkit.algorithm import asks
    from rlkit.functional import keep_all

    problems = []
    if x.algorithm.episodes is not None and x.batch.group_size != 1:
        problems.append(
            f"batch.group_size={x.batch.group_size}: algorithm={x.algorithm.name} samples nothing, so a row is one episode; set it to 1"
        )
    numbers = inspect.signature(x.algorithm.advantage).parameters  # a partial's defaults are what the config has bound
    if x.batch.group_size == 1 and (asks(x.algorithm.advantage, "group_ids") or asks(x.algorithm.normalization, "group_ids")):
        problems.append(
            f"batch.group_size=1: algorithm={x.algorithm.name} compares the samples of a prompt with one another and needs at "
            "least 2; raise it, or choose algorithm=reinforce"
        )
    k = numbers["k"].default if "k" in numbers else None
    if isinstance(k, int) and "group_ids" in numbers and k >= x.batch.group_size > 1:
        problems.append(
            f"algorithm.advantage.k={k}: with batch.group_size={x.batch.group_size} there is one subset of that many samples and "
            "nothing to compare it with, so every advantage is 0; lower it, or raise batch.group_size"
        )
    if x.algorithm.max_refills > 0 and getattr(x.algorithm.group_filter, "func", x.algorithm.group_filter) is keep_all:
        problems.append(
            f"algorithm.max_refills={x.algorithm.max_refills}: the group filter accepts every prompt, so none is ever replaced; "
            "choose algorithm/group_filter=mixed, or set it to 0"
        )
    return problems


def _check_kl(x: Experiment) -> list[str]:
    from rlkit.algorithm import asks

    kl, problems = x.kl, []
    if x.needs_reference and x.reference.name == "none":
        problems.append(f"kl={kl.name} needs a reference to compare with, but reference=none; choose reference=frozen or kl=none")
    if kl.importance_weight and kl.placement != "loss":
        problems.append(f"kl.importance_weight: there is no ratio in the reward (kl.placement={kl.placement}); set it to false")
    if kl.importance_weight and asks(kl.estimator, "logprobs_old"):
        problems.append(f"kl.importance_weight: kl={kl.name} carries the ratio already; set it to false")
    if kl.in_baseline and kl.placement == "loss":
        problems.append(
            "kl.in_baseline: with kl.placement=loss nothing of the KL is in the reward; set it to false, or choose another placement"
        )
    if asks(kl.estimator, "full_kl") and kl.placement != "loss":
        problems.append(
            f"kl={kl.name} kl.placement={kl.placement}: the exact KL of a position is the same whatever token was drawn there, so as a "
            "reward it cannot teach that token; choose kl.placement=loss, or kl=k1"
        )
    return problems


def _check_critic(x: Experiment) -> list[str]:
    a, problems = x.algorithm, []
    if a.critic.active and a.critic.optimizer is None:
        problems.append("algorithm.critic.optimizer: the critic needs an optimizer of its own")
    for name, function in a.parts.items():
        if "values" in inspect.signature(function).parameters and not a.critic.active:
            problems.append(
                f"algorithm.{name} asks for the values of a critic, but there is none; choose algorithm/critic=head (or separate), "
                "or a part without values"
            )
    return problems


def _check_quantities(x: Experiment) -> list[str]:
    from rlkit.algorithm import inputs
    from rlkit.types import QUANTITIES

    parts = {f"algorithm.{name}": function for name, function in x.algorithm.parts.items()}
    if x.kl.estimator is not None:
        parts["kl.estimator"] = x.kl.estimator
    return [
        f"{path}: asks for a quantity '{name}' that does not exist.{nearest(name, QUANTITIES)} There are: {', '.join(QUANTITIES)}"
        for path, function in parts.items()
        for name in inputs(function)
        if name not in QUANTITIES
    ]


def warnings(x: Experiment) -> list[str]:
    """What is legal but probably not meant."""
    from rlkit.functional import forward, k1
    from rlkit.schedules import schedule_warnings

    a, out = x.algorithm, schedule_warnings(x)
    updates = a.epochs * a.minibatches
    if not x.needs_reference and x.reference.name != "none":
        out.append(f"reference={x.reference.name} is not built: no KL uses it (kl={x.kl.name}, kl.coef={x.kl.coef})")
    if x.batch.group_size == 1 and not a.critic.active and a.episodes is None:
        out.append("batch.group_size=1: nothing to compare a rollout with but the rest of the batch; the gradient will be noisy")
    if x.kl.in_reward and getattr(x.kl.estimator, "func", x.kl.estimator) not in (k1, forward):
        out.append(
            f"kl={x.kl.name} kl.placement={x.kl.placement}: as a reward this estimator hardly pulls towards the reference, or pushes away "
            "(table in rlkit/functional/kl.py); kl=k1 does"
        )
    if a.target_kl is not None and updates == 1:
        out.append(f"algorithm.target_kl={a.target_kl} does nothing: with one update a step the policy has not moved when it is checked")
    if "pair_selector" in inspect.signature(a.advantage).parameters and updates > 1:
        out.append(f"algorithm={a.name}: with {updates} updates a step, pair weights after the first are those of the policy before it")
    return out


def dry_run(x: Experiment) -> None:
    """One update on fake data through advantage, weights, loss and backward, in milliseconds and without a model.

    Raises: ConfigError where a part fails, or where the gradient is not finite or zero.
    """
    import torch

    from rlkit.algorithm import choose, estimate_advantages, scale_tokens, surrogate, value_surrogate, weigh
    from rlkit.types import Batch, Scores

    groups, size, width, vocabulary = 2, max(2, min(x.batch.group_size, 64)), 6, 7
    n = groups * size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (n, width), generator=generator)
    mask = (torch.arange(width) >= 2).expand(n, width).clone()
    logits = torch.randn(n, width, vocabulary, generator=generator).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]
    fixed = logprobs.detach()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    rewards = (torch.arange(n) % size == 0).float()
    values = torch.zeros(n, width).requires_grad_()
    batch = Batch(
        ids=ids, attention_mask=torch.ones_like(mask), response_mask=mask, rollout_ids=torch.arange(n),
        step_ids=torch.zeros_like(ids), rewards=rewards, group_ids=torch.arange(n) // size,
        truncated=torch.zeros(n, dtype=torch.bool), lengths=mask.sum(1),
        token_rewards=torch.zeros(n, width).index_fill(1, torch.tensor([width - 1]), 1.0) * rewards[:, None],
        logprobs_sampler=fixed, logprobs_old=fixed, entropy_old=entropy.detach(), logprobs_ref=fixed - 0.1,
        full_kl=torch.full_like(fixed, 0.1), values=values.detach(),
    )  # fmt: skip
    try:
        batch = estimate_advantages(scale_tokens(choose(batch, x.algorithm), x.algorithm), x.algorithm, x.kl)
        batch = weigh(batch, x.algorithm)
        scores = Scores(logprobs, entropy, values, full_kl=logprobs - fixed + 0.1)
        loss, _ = surrogate(batch, scores, x.algorithm, x.kl)
        if x.algorithm.critic.active:
            loss = loss + value_surrogate(batch, scores, x.algorithm.critic)[0]
        loss.backward()
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise ConfigError(f"algorithm={x.algorithm.name}, kl={x.kl.name}: the dry run on fake data fails: {error}") from error
    if logits.grad is None or not torch.isfinite(logits.grad).all() or not logits.grad.any():
        raise ConfigError(f"algorithm={x.algorithm.name}: the dry run's gradient is zero or not finite; check its numbers")


def optimizer_problems(x: Experiment) -> list[str]:
    """What an optimizer says to its numbers, tried on one parameter: with the model it would be too late."""
    import torch

    from rlkit.schedules import phases

    critics = {id(p.algorithm.critic): p.algorithm.critic.optimizer for p in phases(x).values() if p.algorithm.critic.active}
    problems = []
    for path, make in [("optimizer", x.optimizer), *(("algorithm.critic.optimizer", make) for make in critics.values() if make)]:
        try:
            make([torch.nn.Parameter(torch.zeros(1))])
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(f"{path}: {error}; its numbers are {', '.join(f'{k}={v}' for k, v in getattr(make, 'keywords', {}).items())}")
    return problems


def first_steps(x: Experiment) -> dict[str, Experiment]:
    """Phase → its experiment at its first step, every number a plain number; each finds its place at the first and the last step.

    Raises: ConfigError naming the path that does not.
    """
    from rlkit.schedules import at, phases, start

    out = {}
    for name, phase in phases(x).items():
        try:
            at(phase, start(phase)._replace(step=x.trainer.steps - 1))
            out[name] = at(phase, start(phase))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"{f'schedule.phases.{name}, ' if name else ''}schedule.numbers: {error.args[0]}") from error
    return out


def experiment(composed: Composed) -> Experiment:
    """The Experiment of a composed config, validated and dry-run phase by phase. Raises ConfigError with all problems at once."""
    from rlkit.schedules import schedule_problems

    x = build(composed.config)
    problems = schedule_problems(x) + rank_problems(x)
    firsts = {} if problems else first_steps(x)
    problems += [f"schedule.phases.{name}: {problem}" if name else problem for name, first in firsts.items() for problem in validate(first)]
    if firsts and not x.needs_reference and x.reference.name not in ("none", "frozen"):
        problems.append(
            f"reference={x.reference.name}: it would be updated and never used, since no KL compares with it (kl={x.kl.name}, "
            f"kl.coef={x.kl.coef}); choose a kl, or reference=frozen"
        )
    critics = {name: first.algorithm.critic.model for name, first in firsts.items() if first.algorithm.critic.active}
    if len(set(critics.values())) > 1:
        kinds = ", ".join(f"{name}: {model}" for name, model in critics.items())
        problems.append(f"schedule.phases: a run has one critic, and its phases ask for several ({kinds}); choose one for all of them")
    problems += optimizer_problems(x)
    if problems:
        raise ConfigError("\n".join(problems))
    for first in firsts.values():
        dry_run(first)
    return x
