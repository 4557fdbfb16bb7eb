"""What is computed in which precision: adapters, keys and values, the head, shards and
optimizers."""

from __future__ import annotations

import copy
import datetime
import functools
from types import SimpleNamespace

import pytest
import torch

from pretend_gpu import PretendGPU
from rlkit import engines
from rlkit.environments import single_turn
from rlkit.episodes import assemble, collect
from rlkit.errors import ConfigError
from rlkit.models import forward_logprobs, load_policy, pack
from rlkit.models.head import split_model
from rlkit.models.load import LoRA
from rlkit.tasks import arithmetic
from rlkit.training.references import ema
from rlkit.training.update.optimizers import adamw_8bit, make_optimizer


@pytest.fixture
def adapted():
    """The tiny model in bfloat16, with adapters that change what it says."""
    torch.manual_seed(0)  # of the adapters' first factors
    policy = load_policy(path="tiny", dtype="bfloat16", lora=LoRA(rank=16))
    g = torch.Generator().manual_seed(0)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.data.copy_(0.01 * torch.randn(weight.shape, generator=g))
    return policy


def mean_gap(policy) -> float:
    """Nats a token between the sampler, the cached engine, and the trainer."""
    rollouts = collect(
        policy,
        arithmetic(max_samples=12),
        engine=engines.Cached(),
        environment=single_turn(),
        group_size=4,
        seed=1,
        max_new_tokens=48,
    )
    batch = assemble(rollouts, pad_token_id=policy.pad_token_id, device="cpu")
    with torch.no_grad():
        logprobs = forward_logprobs(policy.model, pack(batch.ids, batch.response_mask)).logprobs
    return float((logprobs - batch.logprobs_sampler)[batch.response_mask].abs().mean())


@pytest.mark.slow
def test_adapters_add_nothing_to_the_gap_between_sampler_and_trainer(adapted):
    """Merging them into a bfloat16 base while sampling adds up to 1.1e-3 nats to 2.0e-3; computed
    beside it they add 0.3e-3 at most."""
    found = mean_gap(adapted)
    with adapted.model.disable_adapter():
        assert found <= mean_gap(adapted) + 1e-3


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Precisions that matrices are multiplied in."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes |= {x.dtype for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **kwargs or {})


@pytest.mark.slow
def test_adapters_are_computed_in_the_precision_of_the_base(adapted):
    """They were computed in float32, with copies of every input and output; that of a reference
    too."""
    ema(decay=0.9).init(adapted.model, step=0)
    ids = torch.arange(12).view(2, 6)
    for name in adapted.model.peft_config:
        adapted.model.base_model.set_adapter(name)
        with Products() as products:
            forward_logprobs(adapted.model, pack(ids, ids % 6 > 2)).logprobs.sum().backward()
        assert products.dtypes == {torch.bfloat16}, name
    trained = [p for p in adapted.model.parameters() if p.requires_grad]
    assert trained and {p.dtype for p in trained} == {torch.float32}
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in trained)


def test_keys_and_values_are_kept_in_one_precision(tiny, monkeypatch):
    """Under mixed precision the float32 weight of the keys' norm made the keys float32: one and a
    half times the cache."""
    from rlkit.engines.cached import scheduler

    kept, pages = [], scheduler.Pages
    monkeypatch.setattr(scheduler, "Pages", lambda *given: kept.append(pages(*given)) or kept[-1])
    with torch.autocast("cpu", torch.bfloat16):
        collect(
            tiny,
            arithmetic(max_samples=1),
            engine=engines.Cached(),
            environment=single_turn(),
            group_size=2,
            seed=1,
            max_new_tokens=4,
        )
    assert kept and {x.dtype for cache in kept for x in (*cache.keys, *cache.values)} == {
        torch.bfloat16
    }


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_logits_in_float32_where_the_model_asks_for_them(autocast):
    """A bfloat16 head rounds a logit of 16 to 32 by up to 0.12 nats. Hugging Face's own forward has
    the same head."""
    ids = torch.arange(20)[None] * 7 % 300
    errors = {}
    for asked in (None, "float32"):
        model = load_policy(path="tiny", head_precision=asked).model.requires_grad_(False)
        model = model if autocast else model.to(torch.bfloat16)
        _, head = split_model(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = model.base_model(input_ids=ids).last_hidden_state
            logits = head(states[0])
            assert torch.equal(logits, model(input_ids=ids).logits[0])
        exact = states[0].double() @ head.weight.double().T
        errors[asked] = float((logits.double() - exact).abs().max())
    assert errors["float32"] < 1e-4 < 1e-2 < errors[None]


# ---------------------------------------------------------------------------- shards and optimizers


@pytest.fixture
def one_rank():
    """A process group of this process alone, and the mesh of it."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=20)
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_are_gathered_in_bfloat16_and_summed_in_float32(tiny, one_rank):
    """Without a policy FSDP2 gathers float32 weights under bf16-mixed: twice the bytes."""
    from rlkit.distributed import ranks

    model, seen = copy.deepcopy(tiny.model), []
    layer = model.model.layers[0]
    ranks.shard(model, one_rank, torch.bfloat16)
    layer.mlp.register_forward_pre_hook(
        lambda module, given: seen.append((given[0].dtype, module.up_proj.weight.dtype))
    )
    ids = torch.arange(12).view(2, 6)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        ranks.run_in_forward(
            model, forward_logprobs, pack(ids, ids % 6 > 2)
        ).logprobs.sum().backward()
    assert seen and {weight for _, weight in seen} == {torch.bfloat16}
    ranks.reshard(model)
    assert (
        {p.dtype for p in model.parameters()}
        == {p.grad.dtype for p in model.parameters() if p.grad is not None}
        == {torch.float32}
    )


def test_shards_on_a_gpu_are_gathered_in_bfloat16_where_the_config_leaves_it_open(monkeypatch):
    """The module is still on the CPU when its weights are sharded, and they were gathered in
    float32."""
    from rlkit.distributed import ranks
    from rlkit.training.module import RLModule

    monkeypatch.setattr(ranks, "size", lambda: 2)
    seen = []
    module = SimpleNamespace(
        experiment=SimpleNamespace(
            trainer=SimpleNamespace(strategy="fsdp", precision="auto"),
            model=SimpleNamespace(rank=0),
        ),
        model=torch.nn.Linear(1, 1),
        device=torch.device("cpu"),
        trainer=SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0))),
        learner=SimpleNamespace(
            optimizers=SimpleNamespace(made=[]),
            kept=SimpleNamespace(shard=lambda mesh, *, mixed: seen.append(mixed)),
        ),
        device_mesh={"data_parallel": None},
    )
    RLModule.configure_model(module)
    assert seen == [True]


def test_adam_is_fused_on_cuda_unless_the_user_chose():
    own = functools.partial(torch.optim.AdamW, lr=1e-3)
    assert make_optimizer(own, [torch.nn.Parameter(torch.ones(2))]).defaults["fused"] is None
    with PretendGPU():
        weights = [torch.nn.Parameter(torch.ones(2, device="cuda"))]
        assert make_optimizer(own, weights).defaults["fused"]
        assert not make_optimizer(functools.partial(own, foreach=False), weights).defaults["fused"]


def test_the_8_bit_optimizer_says_what_to_install():
    with pytest.raises(
        ConfigError, match=r"optimizer=adamw_8bit: No module named .*; pip install bitsandbytes"
    ):
        adamw_8bit([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
