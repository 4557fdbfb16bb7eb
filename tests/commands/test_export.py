"""What a run has learned leaves rlkit whole: the same logits from a plain Hugging Face folder; and
a model from such a folder can teach."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.commands.evaluate import restore_policy
from rlkit.commands.export import export
from rlkit.config.compose import compose
from rlkit.errors import ConfigError
from rlkit.models import LoRA, load_policy
from rlkit.models.save import save_policy
from rlkit.runs.card import model_card
from rlkit.training import references as reference

IDS = torch.tensor([[20, 21, 22, 23, 24]])


@pytest.fixture(scope="module", params=cases([0, 4], [4]), ids=["all weights", "adapters"])
def run(request, tmp_path_factory):
    """A run of one large step: its folder, and the logits of its policy."""
    folder = tmp_path_factory.mktemp("run")
    words = [
        "debug=fast",
        "trainer.steps=1",
        "evaluation.n=0",
        "task.max_samples=40",
        "generation.max_new_tokens=32",
        "optimizer.lr=0.01",
        "algorithm.entropy_coef=1",
        f"model.lora.rank={request.param}",
    ]
    assert main(["train", *words, f"hydra.run.dir={folder}/a"]) == 0
    policy = load_policy(path="tiny", lora=LoRA(rank=request.param))
    before = logits(policy.model)
    restore_policy(policy, folder / "a" / "checkpoints")
    assert not torch.allclose(logits(policy.model), before, atol=1e-3)
    return folder / "a", logits(policy.model)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_the_card_names_the_algorithm_of_each_phase_and_no_command_of_a_run_from_python(tmp_path):
    """The group that the phases replace never ran, and overrides do not make Python objects."""
    config = compose(["schedule=reinforce_to_ppo"]).config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    card = model_card(tmp_path, 6, adapters=False)
    assert "6 RL steps with `reinforce, then ppo`" in card and "grpo" not in card
    assert "parts of this run are python objects" in card.lower() and "rlkit train" not in card


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["false", "true"])
def test_the_folder_gives_the_same_logits(run, merge, tmp_path, capsys, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, expected = run
    assert main(["export", f"run={folder}", f"to={tmp_path}/out", f"merge={merge}"]) == 0
    assert "step 1" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    # merging adds B A to the weights before the product with the input instead of after it
    torch.testing.assert_close(logits(loaded), expected, atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.chat_template == tiny.renderer.tokenizer.chat_template
        and tokenizer.get_vocab() == tiny.renderer.tokenizer.get_vocab()
    )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    card = (tmp_path / "out" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    adapters = merge == "false" and (folder / "model" / "adapter_config.json").exists()
    assert (
        header["library_name"] == ("peft" if adapters else "transformers")
        and "rlkit" in header["tags"]
        and "base_model" not in header
    )
    assert "| learning rate | `0.01` |" in card and "rlkit train debug=fast" in card
    assert str(tmp_path) not in card and str(folder) not in card, "a place of this machine"


@pytest.mark.slow
def test_refusals(run, tmp_path, capsys):
    folder, _ = run
    (tmp_path / "out").mkdir()
    for words, expected in {
        (f"run={folder}", f"to={tmp_path}/out"): "exists already",
        (f"run={folder}", "merge=yes"): "true or false",
        (f"run={folder}", "step=3"): "takes the settings run=",
        ("run=nowhere",): "no run folder",
        (): "takes one run",
    }.items():
        assert main(["export", *words]) == 2 and expected in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_adapters_on_adapters_leave_merged_alone(tmp_path):
    """No other program would find the base of their base."""
    save_policy(tmp_path / "first", load_policy(path="tiny", lora=LoRA(rank=2)))
    model = {"_target_": "rlkit.models.load_policy", "path": f"{tmp_path}/first"}
    adapted = model | {"lora": {"_target_": "rlkit.models.LoRA", "rank": 2}}
    with pytest.raises(ConfigError, match=r"folder of adapters; use merge=true"):
        export(adapted | {"_partial_": True}, checkpoint=tmp_path, out=tmp_path / "out")


@pytest.mark.slow
def test_another_model_is_the_reference():
    """The teacher's own scores, whatever the policy does, also under LoRA; nothing of it goes into
    the checkpoint."""
    teacher = load_policy(path="tiny_guess").model
    for policy in (
        load_policy(path="tiny").model,
        load_policy(path="tiny", lora=LoRA(rank=2)).model,
    ):
        kept = reference.frozen(path="tiny_guess")
        state = kept.init(policy, step=7)
        with kept.model(state, policy) as scored:
            assert torch.equal(logits(scored), logits(teacher)) and not torch.equal(
                logits(scored), logits(policy)
            )
        assert kept.save(state) == {} and not any(p.requires_grad for p in state.parameters())


@pytest.mark.slow
def test_a_teacher_with_more_padding_behind_its_vocabulary_teaches(tmp_path):
    """The exact KL is that of the ids which both have; the teacher's rows of padding take no
    probability."""
    teacher = load_policy(path="tiny_guess")
    rows = teacher.model.get_output_embeddings().weight.shape[0]
    teacher.model.resize_token_embeddings(rows + 64, mean_resizing=False)
    teacher.model.save_pretrained(tmp_path / "teacher")
    teacher.renderer.tokenizer.save_pretrained(tmp_path / "teacher")
    words = [
        "debug=fast",
        "evaluation.n=0",
        "trainer.steps=1",
        "trainer.accelerator=cpu",
        "kl=full",
        "batch.group_size=4",
    ]
    folders = [tmp_path / "padded", tmp_path / "plain"]
    for path, folder in zip((tmp_path / "teacher", "tiny_guess"), folders, strict=True):
        assert main(["train", *words, f"reference.path={path}", f"hydra.run.dir={folder}"]) == 0
    padded, plain = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in folders
    )
    assert (
        padded["kl/estimate"] == pytest.approx(plain["kl/estimate"], rel=1e-4)
        and plain["kl/estimate"] > 0
    )


def save_without_seven(tokenizer, folder):
    """The tokenizer with another token in place of 7."""
    tokenizer.save_pretrained(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["<new>"] = spec["model"]["vocab"].pop("7")
    (folder / "tokenizer.json").write_text(json.dumps(spec))


@pytest.mark.slow
def test_a_teacher_with_another_vocabulary_is_refused_before_any_weights_are_loaded(
    tmp_path, monkeypatch, capsys
):
    from rlkit import models

    other = load_policy(path="tiny")
    other.model.save_pretrained(tmp_path)
    save_without_seven(other.renderer.tokenizer, tmp_path)
    monkeypatch.setattr(
        models.load, "pretrained_model", lambda *_, **__: pytest.fail("weights are loaded")
    )
    assert (
        main(
            [
                "train",
                "debug=fast",
                "evaluation.n=0",
                f"reference.path={tmp_path}",
                f"hydra.run.dir={tmp_path / 'run'}",
            ]
        )
        == 2
    )
    assert (
        "another vocabulary than model.path=tiny" in (said := capsys.readouterr().err)
        and "differs is '7'" in said
    )


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path, tiny):
    tiny.model.save_pretrained(tmp_path)
    save_without_seven(tiny.renderer.tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="another vocabulary"):
        reference.frozen(path=str(tmp_path)).init(tiny.model)
    with pytest.raises(ConfigError, match=r"reference\.path=/nowhere"):
        reference.frozen(path="/nowhere").init(tiny.model)
