"""Loading a policy: what trains, what ends a reply, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import GPT2Config, Phi3Config, Phi3ForCausalLM

from rlkit.errors import ConfigError, TemplateError
from rlkit.models import LoRA, encode_prompt, has_tool_prompt, load, load_policy
from rlkit.models.load import TINY, pretrained_config
from rlkit.models.packing import ATTENTION
from rlkit.models.save import save_policy


def test_every_end_token_of_the_generation_config_counts(tiny):
    """Only one of several honoured makes nearly every reply look cut."""
    tokenizer = tiny.renderer.tokenizer
    assert set(tiny.eos_token_ids) == {
        tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    }


def test_weights_ship_in_bf16_and_load_as_fp32(tiny):
    from safetensors import safe_open

    with safe_open(TINY / "model.safetensors", "pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert {p.dtype for p in tiny.model.parameters()} == {torch.float32}


def test_a_model_under_adapters_reads_packed_rows():
    """Without that, shared prompts are computed once a sample."""
    policy = load_policy(path="tiny", lora=LoRA(rank=2))
    assert policy.model.config._attn_implementation == ATTENTION


def test_lora_trains_float32_adapters_over_a_frozen_base():
    policy = load_policy(path="tiny", dtype="bfloat16", lora=LoRA(rank=4))
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n and p.dtype == torch.float32 for n, p in trained.items())
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert all(p.dtype == torch.bfloat16 for p in frozen)
    for target in LoRA().targets:
        assert any(f".{target}." in n for n in trained), target


@pytest.mark.slow
def test_a_folder_of_adapters_is_its_base_with_them_added(tiny, tmp_path, monkeypatch):
    """Whatever folder it is loaded from, and again when further adapters are trained on it."""
    monkeypatch.chdir(tmp_path)
    save_policy(tmp_path / "0", load_policy(path="tiny"))
    ids = torch.tensor([[20, 21, 22, 23]])
    for number in range(2):
        policy = load_policy(path=str(number), lora=LoRA(rank=2))
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        save_policy(tmp_path / str(number + 1), policy)
        expected = policy.model.eval()(ids).logits
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")
            loaded = load_policy(path=str(tmp_path / str(number + 1)))
        # B A is added to the weights, and no longer multiplied with the input
        torch.testing.assert_close(loaded.model.eval()(ids).logits, expected, atol=1e-4, rtol=1e-4)
        assert not any("lora_" in name for name, _ in loaded.model.named_parameters())
    assert (
        pretrained_config(str(tmp_path / "2")).num_hidden_layers
        == tiny.model.config.num_hidden_layers
    )


@pytest.mark.slow
@pytest.mark.parametrize("base", ["tiny", "tiny_guess"])
def test_adapters_of_an_embedded_model_are_added_to_the_same_one(base, tmp_path):
    """Both models are in one folder, and adapters of tiny_guess were added to tiny."""
    policy = load_policy(path=base, lora=LoRA(rank=2))
    save_policy(tmp_path / "own", policy, tokenizer=False)
    ids = torch.tensor([[20, 21, 22]])
    loaded = load_policy(path=str(tmp_path / "own"))  # with the tokenizer of its base
    assert loaded.eos_token_ids == policy.eos_token_ids
    torch.testing.assert_close(
        loaded.model.eval()(ids).logits, policy.model.eval()(ids).logits, atol=1e-4, rtol=1e-4
    )


def test_targets_that_the_model_lacks_are_named(capsys):
    """Phi has one projection for queries, keys and values; three targets of seven had no layer."""
    config = Phi3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    load.add_lora(Phi3ForCausalLM(config), LoRA(rank=2))
    said = capsys.readouterr().out
    assert "no layer q_proj, k_proj, v_proj" in said and "qkv_proj" in said


@pytest.mark.parametrize("named", [{}, {"base_model_name_or_path": None}, []])
def test_adapters_without_a_base_are_refused(named, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(ConfigError, match="leads to no base model"):
        pretrained_config(str(tmp_path))


@pytest.mark.parametrize("bases", [["a"], ["b", "a"], ["b", "c", "b"]], ids="-".join)
def test_adapters_that_name_one_another_are_refused(bases, tmp_path):
    """They were followed until Python's stack was full."""
    for name, base in zip("abc", bases, strict=False):
        folder = tmp_path / name
        folder.mkdir()
        config = {"base_model_name_or_path": str(tmp_path / base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="leads to no base model"):
        pretrained_config(str(tmp_path / "a"))


def test_bf16_weights_are_not_trained():
    with pytest.raises(ConfigError, match=r"model\.dtype=bfloat16"):
        load_policy(path="tiny", dtype="bfloat16")


@pytest.mark.parametrize("revision", [None, "main", "abc123"])
def test_remote_code_needs_a_pinned_commit(revision):
    with pytest.raises(ConfigError, match=r"trust_remote_code.*commit"):
        load_policy(path="tiny", trust_remote_code=True, revision=revision)


def test_missing_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path=.*nothing"):
        load_policy(path=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/no/such/place", "there is no such folder or file"),
        ("./nowhere", "there is no such folder or file"),
        ("empty", "the folder holds no config.json"),
    ],
)
def test_a_path_without_a_model_says_why(path, why, tmp_path, monkeypatch):
    """The errors of transformers spoke of backend tokenizers and of repo ids."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"model.path={path}: cannot be loaded .{why}"):
        load_policy(path=path)


def test_a_template_of_the_users_that_fails_is_named_by_its_file(tmp_path):
    """The message named the folder of the model, which has a template of its own."""
    file = tmp_path / "mine.jinja"
    file.write_text("{{ raise_exception('mine') }}")
    policy = load_policy(path="tiny", chat_template=str(file))
    with pytest.raises(TemplateError, match=rf"model\.chat_template={file} fails: mine"):
        encode_prompt(policy.renderer, [{"role": "user", "content": "1"}])


def test_missing_template_file_is_named():
    with pytest.raises(ConfigError, match=r"model.chat_template=no.jinja"):
        load_policy(path="tiny", chat_template="no.jinja")


def test_an_exported_policy_keeps_the_tool_prompt_that_it_was_trained_with(tmp_path):
    save_policy(tmp_path / "out", load_policy(path="tiny", tools="prompt"))
    assert "You may call one or more" in (tmp_path / "out" / "chat_template.jinja").read_text()
    tokenizer = load_policy(path=str(tmp_path / "out")).renderer.tokenizer
    assert has_tool_prompt(tokenizer)
    assert not has_tool_prompt(load_policy(path="tiny").renderer.tokenizer)


def test_model_without_a_template_is_refused(tmp_path, monkeypatch):
    """Before its weights are read."""
    monkeypatch.setattr(load, "pretrained_model", lambda *_, **__: pytest.fail("weights are read"))
    shutil.copytree(TINY, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TemplateError, match="no chat template"):
        load_policy(path=str(tmp_path / "m"))


def test_dropout_is_off_and_the_mode_is_training(tmp_path):
    """With dropout the first ratio is not 1; in evaluation mode gradient checkpointing is silently
    off."""
    shutil.copytree(TINY, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    policy = load_policy(path=str(tmp_path / "m"))
    assert policy.model.training and policy.model.config.attention_dropout == 0.0
    ids = torch.arange(10)[None]
    assert torch.equal(policy.model(ids).logits, policy.model.eval()(ids).logits)


def test_every_name_of_dropout_is_known():
    """GPT-2 names three of them without the word."""
    config = load.remove_dropout(GPT2Config())
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0


def test_gradient_checkpointing_recomputes(tiny):
    """Each layer runs again in the backward pass, and the gradient is the same."""
    policy = load_policy(path="tiny", gradient_checkpointing=True)
    calls = []
    layer = policy.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = torch.arange(12)[None]
    policy.model(ids).logits.square().mean().backward()
    assert len(calls) == 2
    plain = load_policy(path="tiny").model
    plain(ids).logits.square().mean().backward()
    # recomputation repeats the same float32 operations
    torch.testing.assert_close(
        layer.up_proj.weight.grad,
        plain.model.layers[0].mlp.up_proj.weight.grad,
        rtol=1e-5,
        atol=1e-8,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_name(tmp_path, tiny, value):
    """The first sampled token ended the run in torch.multinomial; the model was already the
    fault."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_to(tmp_path / "model", tiny))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = value
    model.save_pretrained(tmp_path / "model")
    pattern = (
        r"model\.path=.*model: 1 of the [\d,]+ numbers of the weight"
        r" model\.layers\.1\.mlp\.up_proj\.weight are nan or infinite"
    )
    with pytest.raises(ConfigError, match=pattern):
        load_policy(path=str(tmp_path / "model"))


def test_a_file_of_weights_that_is_no_such_file_is_refused(tmp_path, tiny):
    """safetensors raises an error of its own, which is neither OSError nor ValueError."""
    folder = save_to(tmp_path / "model", tiny)
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(ConfigError, match=r"model\.path=.*cannot be loaded"):
        load_policy(path=str(folder))


def save_to(folder, policy):
    policy.model.save_pretrained(folder)
    policy.renderer.tokenizer.save_pretrained(folder)
    return folder


def test_adapters_on_layers_that_the_model_lacks_are_refused_with_its_names():
    """PEFT's own error named a class of PEFT and no key."""
    with pytest.raises(ConfigError, match=r"model\.lora\.targets=\['foo'\].*down_proj.*q_proj"):
        load_policy(path="tiny", lora=LoRA(rank=2, targets=("foo",)))
