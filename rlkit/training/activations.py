"""Decide whether the updates of a run keep their activations or recompute them. This is the choice
for model.gradient_checkpointing=auto. It is made once, from a measurement on a few tokens.

`measure_activations` measures, and `fits` decides. A resumed run keeps the decision, even on a
machine with more or less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlkit.distributed import ranks
from rlkit.engines import Cached
from rlkit.engines.cached.cache import compute_cache_bytes, count_token_bytes
from rlkit.environments import find_environment
from rlkit.episodes.episode import read_opening
from rlkit.models.chat import encode_prompt
from rlkit.models.checkpointing import can_checkpoint, checkpoint_activations, is_checkpointed
from rlkit.models.critic import SeparateCritic, make_critic
from rlkit.models.fused import get_update_kernel
from rlkit.models.head import split_model
from rlkit.models.log_probs import choose_chunk_logits, compute_states
from rlkit.models.packing import choose_kernels, pack
from rlkit.models.shape import read_model_shape
from rlkit.system import rng
from rlkit.system.adapters import base_model, has_adapters
from rlkit.system.device import autocast, precision, total_memory
from rlkit.training.experiment import Experiment
from rlkit.training.schedules import list_phases
from rlkit.types import Policy, Task, bound

AUTO = "auto"
# The usable share of a device's memory. The rest is for temporary tensors of one layer and for
# gaps between blocks. The share is an assumption.
USABLE = 0.9
# Bytes of the libraries, or of CUDA with its kernels. Imports take 0.45 GiB on a CPU; for a GPU the
# number is an assumption.
LIBRARIES = 1 << 30
# Bytes for one logit of a chunk, together with everything computed from it: six float32 numbers.
LOGITS = 6 * 4
# On a GPU, memory is counted for at most this many tokens of a micro-batch. The memory probe halves
# larger micro-batches until they fit. We assume that this costs less than recomputing activations.
MOST_COUNTED = 4096
MEASURED = 128  # tokens of the longest row in the measurement


class Needs(NamedTuple):
    """Hold the memory in bytes that an update needs on one device if the update keeps its
    activations."""

    weights: int  # of policy, critic, references and the copy for decoding
    training: int  # of gradients, and of two moments per trained parameter
    activations: int  # of one micro-batch
    logits: int  # of one chunk of logits

    @property
    def update(self) -> int:
        return sum(self)


class Decision(NamedTuple):
    """Hold the decision for model.gradient_checkpointing=auto, and the numbers that led to this
    decision."""

    recompute: bool
    needs: Needs
    cache: int  # bytes of the engine's keys and values
    tokens: int  # number of tokens in the micro-batch
    total: int  # bytes of the device's memory, or this process's share of it


def fits(needs: Needs, cache: int, total: int) -> bool:
    """Return whether an update that keeps its activations fits into memory: `needs + cache +
    LIBRARIES ≤ USABLE · total`, in bytes."""
    return needs.update + cache + LIBRARIES <= USABLE * total


# ---------------------------------------------------------------------------------------- measuring


def saved_bytes(run: Callable[[], Any], apart: Iterable[Tensor] = ()) -> int:
    """Count the bytes that autograd keeps for the backward pass of `run`'s result. Tensors that
    share memory count once.

    Args:
      run: a function with the forward pass.
      apart: tensors whose memory does not count, for example weights.
    """
    storages: dict[int, Any] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # kept alive, so that its address is not reused

    with torch.enable_grad(), saved_tensors_hooks(note, _no_backward):
        given = run()
    own = {tensor.untyped_storage().data_ptr() for tensor in apart}
    found = sum(s.nbytes() for address, s in storages.items() if address not in own)
    del given
    return found


def _no_backward(_: Any) -> Tensor:
    raise AssertionError("a pass that only measures has no backward pass")


def measure_activations(model: nn.Module, rows: int, width: int) -> int:
    """Measure the bytes that a model's trunk keeps for the backward pass of `rows` packed rows of
    `width` tokens. The result is `a + rows · (b · width + c · width²)`, with the coefficients from
    `fit_activations`."""
    a, b, c = fit_activations(model)
    return int(a + rows * (b * width + c * width * width))


def fit_activations(model: nn.Module) -> tuple[float, float, float]:
    """Fit the coefficients a, b and c of `a + b·L + c·L²`. This is the number of bytes that a
    model's trunk keeps for the backward pass of a row of L tokens.

    The trunk reads three rows, of n, 2n and 4n ≤ MEASURED tokens. `a` ≥ 0 counts the weights that
    autocast converts. `c` is 0 unless attention stores its scores.
    """
    context = read_model_shape(base_model(model).config).context or MEASURED
    n = max(2, min(MEASURED, context) // 4)
    apart = [*model.parameters(), *model.buffers()]
    device = next(model.parameters()).device
    kernels = choose_kernels(device)._replace(
        steps=False
    )  # otherwise a single row would be padded to thousands of tokens
    small, middle, large = (
        saved_bytes(partial(_read_row, model, length, device, kernels), apart)
        for length in (n, 2 * n, 4 * n)
    )
    c = ((large - middle) / (2 * n) - (middle - small) / n) / (3 * n)
    if c < 0:  # an effect of rounding memory to whole blocks
        c = 0.0
    b = (large - middle) / (2 * n) - 6 * n * c
    a = large - 4 * n * b - 16 * n * n * c
    return max(0.0, a), b, c


def _read_row(model: nn.Module, length: int, device: torch.device, kernels: Any) -> Tensor:
    """Compute hidden states of one row of `length` tokens. All tokens but the first count as
    sampled."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(length + 1, device=device)[None] % embedding.num_embeddings
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    return compute_states(model, pack(ids, mask, kernels=kernels))


class Lengths(NamedTuple):
    """Hold the length of the shortest prompt among the first tasks, and the longest possible length
    of a context, both in tokens."""

    prompt: int
    width: int


def longest_lengths(x: Experiment, policy: Policy, tasks: Sequence[Task]) -> Lengths:
    """Return the lengths of the shortest prompt and of the longest possible rollout. The first 16
    tasks, the environment and the model's context limit the length of a rollout."""
    turns = [(find_environment(x.environment, task), task) for task in tasks[:16]]
    openings = [read_opening(task, environment) for environment, task in turns]
    prompts = [len(encode_prompt(policy.renderer, own.prompt, own.schemas)) for own in openings]
    tokens = x.generation.max_new_tokens
    whole = [p + e.max_steps * tokens for p, (e, _) in zip(prompts, turns, strict=True)]
    longest = max(whole, default=1)
    return Lengths(min(prompts, default=0), min(policy.context_length, longest))


# ----------------------------------------------------------------------------------------- deciding


def decide(x: Experiment, policy: Policy, tasks: Sequence[Task], device: torch.device) -> Decision:
    """Measure the memory that the run's updates need on a device, and decide whether to recompute
    activations.

    The memory is computed for a micro-batch of trainer.micro_batch_tokens tokens. An update may
    have fewer tokens, even if all of its rollouts have the greatest possible length. The memory is
    then computed for this smaller number. On one GPU at most MOST_COUNTED tokens are counted,
    because the memory probe halves larger micro-batches before the first step. For a scheduled
    number, the first value is used.
    """
    with rng.keep_generators(), autocast(x, device, updates=True):
        width = max(
            longest_lengths(phase, policy, tasks).width for phase in list_phases(x).values()
        )
        rows = max(_rows(phase, width, device) for phase in list_phases(x).values())
        critic = _separate_critic(x, policy.model)
        trunks = [policy.model] if critic is None else [policy.model, critic.model]
        activations = sum(measure_activations(trunk, rows, width) for trunk in trunks)
    weights, training = _count_held_bytes(x, policy.model, critic, device)
    _, head = split_model(policy.model)
    entries = min(choose_chunk_logits(torch.device(device)), rows * width * head.weight.shape[0])
    needs = Needs(weights, training, activations, LOGITS * entries)
    total = total_memory(device)
    cache = _cache(x, policy, width, total, device)
    return Decision(not fits(needs, cache, total), needs, cache, rows * width, total)


def _rows(x: Experiment, width: int, device: torch.device) -> int:
    """Return the number of rollouts, each of `width` tokens, in the micro-batch used by `decide` to
    compute the memory."""
    tokens = x.trainer.micro_batch_tokens
    if device.type == "cuda" and ranks.size() == 1:
        tokens = min(tokens, MOST_COUNTED)
    rollouts = -(-x.batch.prompts * x.batch.group_size // x.algorithm.minibatches)
    return max(1, min(tokens // width, -(-rollouts // ranks.size())))


def _separate_critic(x: Experiment, model: nn.Module) -> SeparateCritic | None:
    """Make a separate critic like the critic of the run, only for the measurement. Return None if
    the run has no separate critic."""
    critics = [phase.algorithm.critic for phase in list_phases(x).values()]
    if any(critic.active and critic.model == "separate" for critic in critics):
        made = make_critic(model, model="separate")
        assert isinstance(made, SeparateCritic)
        return made
    return None


# teachers that are the policy itself, or that are behind a server
HOLD_NOTHING = ("live", "vllm")


def _count_held_bytes(
    x: Experiment, model: nn.Module, critic: nn.Module | None, device: torch.device
) -> tuple[int, int]:
    """Count the bytes that a run holds on this device, and return two numbers.

    The first number counts the weights of the policy, the critic, the references and the teachers.
    It includes all copies of weights for sampling. The second number counts the gradients and the
    optimizer's state. The state has two moments in float32 for each trained parameter.

    A reference or a teacher loaded from a path counts as one copy of the policy's base.
    """
    base = sum(p.nbytes for p in model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    own = sum(p.nbytes for p in trained)
    weights = base
    if critic is not None:
        trained += [p for p in critic.parameters() if p.requires_grad]
        weights += sum(p.nbytes for p in critic.parameters())
    references = {
        id(phase.reference): phase.reference
        for phase in list_phases(x).values()
        if phase.needs_reference and phase.reference.name != "live"
    }
    teachers = x.teacher.models.values() if x.needs_teacher else ()
    for held in (*references.values(), *(t for t in teachers if t.name not in HOLD_NOTHING)):
        loaded = bound(held.init).get("path")
        weights += own if has_adapters(model) and not loaded else base
    training = sum(p.nbytes + 2 * 4 * p.numel() for p in trained)
    if x.trainer.strategy == "fsdp":
        weights //= ranks.size()
        training //= ranks.size()
    if precision(x, device) == "bf16-mixed":
        weights += 2 * sum(p.numel() for p in model.parameters())  # the copy for decoding
    if _samples_beside(x, device):
        weights += base  # the weights of the sampling process
    return weights, training


def _cache(x: Experiment, policy: Policy, width: int, total: int, device: torch.device) -> int:
    """Return the number of bytes that the engine's cache of keys and values takes during an update.

    On a GPU this is the size of the whole cache. On a CPU, a page takes no memory until the engine
    writes to the page. Therefore a CPU counts at most `engine.max_rows` rows of `width` tokens.
    With asynchrony=overlap on one device, both processes have a cache. The result is 0 for an
    engine without `keep_cache`, and for every engine other than `Cached`.
    """
    engine = x.generation.engine
    if not isinstance(engine, Cached) or not engine.keep_cache:
        return 0
    causal = base_model(policy.model)
    token = count_token_bytes(causal)
    # as the engine does when it makes its cache
    share = compute_cache_bytes(sum(p.nbytes for p in causal.parameters()), total) // token
    most = engine.max_rows * (policy.context_length if device.type == "cuda" else width)
    tokens = min(engine.cached_tokens or engine.max_cached_tokens or share, most)
    return tokens * token * (2 if _samples_beside(x, device) else 1)


def _samples_beside(x: Experiment, device: torch.device) -> bool:
    """Return whether a second process samples on the same device, as with asynchrony=overlap."""
    alone = device.type == "cuda" and torch.cuda.device_count() > 1
    return x.asynchrony.mode == "overlap" and not alone


def settle_activations(
    x: Experiment, policy: Policy, tasks: Sequence[Task], device: torch.device
) -> str:
    """Decide what model.gradient_checkpointing=auto means for the run, and change the policy's
    setting. The decision is the same on all ranks. Return a line about the decision, or an empty
    line if the config names a value.

    Call this function before the kernels are chosen and before a critic is made. The choice of the
    kernels depends on the policy's setting, and a separate critic gets a copy of the setting. With
    model.kernel=fused, activations are always kept. If the activations do not fit into memory, the
    returned line reports this.
    """
    if x.model.gradient_checkpointing != AUTO:
        return ""
    if not can_checkpoint(policy.model):
        return "activations: kept (this model cannot recompute them)"
    decision = ranks.broadcast(lambda: decide(x, policy, tasks, device))
    fused = get_update_kernel(split_model(policy.model)[0]).asked == "fused"
    checkpoint_activations(policy.model, decision.recompute and not fused)
    return activations_line(decision, fused=fused)


def activations_line(decision: Decision, *, fused: bool = False) -> str:
    """Return a line such as `activations: kept (one micro-batch of 9,600 tokens takes 0.41 GiB;
    everything together …)`.

    Args:
      fused: True if model.kernel=fused keeps the activations in spite of the decision.
    """
    gib = 2**30
    together = decision.needs.update + decision.cache + LIBRARIES
    figures = (
        f"one micro-batch of {decision.tokens:,} tokens takes"
        f" {decision.needs.activations / gib:.2f} GiB; everything together takes"
        f" {together / gib:.2f} GiB; the limit is {USABLE * decision.total / gib:.2f} GiB,"
        f" {USABLE:.0%} of the memory"
    )
    if decision.recompute and fused:
        return (
            f"activations: kept although they do not fit, because model.kernel=fused cannot"
            f" recompute them ({figures}); lower trainer.micro_batch_tokens, or set"
            " model.kernel=auto; then model.gradient_checkpointing=auto recomputes them"
        )
    return f"activations: {'recomputed' if decision.recompute else 'kept'} ({figures})"


def keep_activations(
    x: Experiment, model: nn.Module, critic: nn.Module | None, recompute: bool
) -> str:
    """Apply the decision of a checkpoint to the policy and a separate critic, if the config says
    auto. Return a sentence if this machine has made another decision, and an empty string if
    not."""
    if x.model.gradient_checkpointing != AUTO or is_checkpointed(model) == recompute:
        return ""
    checkpoint_activations(model, recompute)
    if isinstance(critic, SeparateCritic):
        checkpoint_activations(critic.model, recompute)
    word = "recomputed" if recompute else "kept"
    return f"activations are {word}, as the run did so far (model.gradient_checkpointing)"
