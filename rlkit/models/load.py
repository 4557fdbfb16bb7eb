"""From a model's name to a Policy: weights, tokenizer, chat template, LoRA."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.errors import ConfigError, TemplateError, install
from rlkit.models.chat import Renderer, ToolForm, make_renderer
from rlkit.models.checkpointing import checkpoint_activations
from rlkit.models.fused import Kernel, choose_kernel
from rlkit.models.head import Float32Head
from rlkit.models.packing import allow_packing
from rlkit.models.shape import read_model_shape
from rlkit.system.adapters import lora_layers
from rlkit.system.digest import SUMS, find_folder_damage
from rlkit.system.files import cache_folder
from rlkit.types import Policy, ranges, reaches, safe

TINY = Path(__file__).parent / "tiny"
# path → variant of the weights in TINY: model.VARIANT.safetensors
EMBEDDED = {"tiny": None, "tiny_guess": "guess_number"}
FETCHED = "get:"  # before the name of a model fetched into the cache folder by `rlkit get`


@safe("targets")
@ranges(rank=(0, None), alpha=(1, None))
class LoRA(NamedTuple):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Dropout is 0: sampler and trainer must
    agree.

    rank 0 means none: all weights are trained.
    """

    rank: int = 0
    alpha: int = 32
    targets: Sequence[str] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )


@reaches(
    path="path",
    revision="path",
    attention="program",
    chat_template="path",
    trust_remote_code="program",
)
@safe("interruption", "device")
def load_policy(
    *,
    path: str,
    revision: str | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    attention: str = "sdpa",
    head_precision: Literal["float32"] | None = None,
    gradient_checkpointing: bool | Literal["auto"] = False,
    lora: LoRA = LoRA(),  # noqa: B008  (a NamedTuple: immutable)
    enable_thinking: bool | None = None,
    interruption: str = "",
    chat_template: str | None = None,
    tools: ToolForm = "auto",
    trust_remote_code: bool = False,
    kernel: Kernel = "auto",
    device: torch.device | str = "cpu",
) -> Policy:
    """Loads a causal LM for training.

    Args:
      path: "tiny" or "tiny_guess" (shipped with rlkit), a local folder, a GGUF file, a hub id, or
        "get:NAME" for a model fetched by `rlkit get NAME`. A folder of adapters stands for their
        base model with the adapters added to its weights.
      revision: of a hub id; a commit makes the run reproducible.
      dtype: of the base weights. "auto" is bfloat16 under LoRA on a GPU (the adapters stay
        float32), float32 otherwise, because trained bfloat16 weights do not move at
        reinforcement-learning rates.
      attention: implementation name of transformers (sdpa, eager, flash_attention_2).
      head_precision: "float32" computes logits in float32 also if the base is narrower, in training
        and in rlkit's own engines. vLLM keeps its own precision.
      gradient_checkpointing: True recomputes activations in the backward pass: less memory, about a
        third more time. "auto" loads the model as False does; a training run then switches it on if
        memory requires it (rlkit.training.activations).
      lora: adapters; rank 0 trains everything.
      enable_thinking: handed to the chat template; None leaves the template's default.
      interruption: the text generation.max_thinking_tokens writes before the closing tag; not
        trained on.
      chat_template: a file with a template to replace the tokenizer's.
      tools: the text that writes tools into prompts: the model's "template", or rlkit's tool
        "prompt" in front of it. "auto" is the template if it mentions tools, and else the prompt.
      trust_remote_code: run the model's own code. Needs a pinned revision.
      kernel: of updates on a CPU: "fused" C code (fused.py), "eager" calls of torch, "auto" the
        fused one if possible.
      device: of the weights.
    Raises: ConfigError or TemplateError naming the key to change.
    """
    if trust_remote_code and not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise ConfigError(
            "model.trust_remote_code=true runs code from the hub: pin model.revision to a 40-digit"
            " commit"
        )
    if dtype == "bfloat16" and lora.rank == 0:
        raise ConfigError(
            "model.dtype=bfloat16 trains bfloat16 weights, which do not move at these rates; use"
            " float32, or LoRA"
        )
    half = dtype == "bfloat16" or (
        dtype == "auto" and lora.rank > 0 and torch.device(device).type == "cuda"
    )
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"rlkit.load_policy: device={device}: torch finds no CUDA device here")
    hub = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = pretrained_tokenizer(path, **hub)
    if chat_template is not None:
        file = Path(chat_template).expanduser()
        if not file.is_file():
            raise ConfigError(f"model.chat_template={chat_template}: no such file")
        tokenizer.chat_template = file.read_text()
        tokenizer.template_file = chat_template
    # before the weights, to refuse a tokenizer without a template at once
    renderer = make_renderer(
        tokenizer, enable_thinking=enable_thinking, interruption=interruption, tools=tools
    )
    model = pretrained_model(
        path, dtype=torch.bfloat16 if half else torch.float32, attention=attention, **hub
    )
    model.to(device)
    check_weights(model, path)
    if head_precision == "float32":
        # for every forward of the model, Hugging Face's own too
        model.get_output_embeddings().__class__ = Float32Head
    if lora.rank > 0:
        model = add_lora(model, lora)
    # after the adapters: PEFT puts a hook on the embeddings if the model already recomputes
    checkpoint_activations(model, gradient_checkpointing is True)
    choose_kernel(model, kernel)
    # gradient checkpointing works only in training mode; engines sample in the other mode
    model.train()
    return _policy(model, renderer)


def pretrained_tokenizer(path: str, **hub: Any) -> Any:
    """The tokenizer at a model's path. Raises ConfigError if it is absent or one of its files is
    damaged."""
    from transformers import AutoTokenizer

    with _loading(path, weights=False) as place:
        return AutoTokenizer.from_pretrained(**place, **hub)


def pretrained_config(path: str, **hub: Any) -> Any:
    """The config at a model's path; no weights are read. Raises ConfigError if it is absent or
    damaged."""
    from transformers import AutoConfig

    base = find_adapters_base(path)
    if base is not None:
        return pretrained_config(base, **hub)
    with _loading(path, weights=False) as place:
        return AutoConfig.from_pretrained(**place, **hub)


def pretrained_model(
    path: str, *, dtype: torch.dtype | str, attention: str = "sdpa", **hub: Any
) -> Any:
    """The causal LM at a model's path, without dropout; dtype "auto" is the one it was saved in.

    Raises: ConfigError if it cannot be loaded, or if a file differs from the one `save_policy`
    wrote.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    base = find_adapters_base(path)
    if base is not None:
        model = pretrained_model(base, dtype=dtype, attention=attention, **hub)
        return _with_adapters(model, path)
    logging.disable_progress_bar()
    with _loading(path, weights=True) as place:
        config = remove_dropout(AutoConfig.from_pretrained(**place, **hub))
        model = AutoModelForCausalLM.from_pretrained(
            **place,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            variant=EMBEDDED.get(path),
            **hub,
        )
    return _dequantize(model) if "gguf_file" in place else model


def find_adapters_base(path: str) -> str | None:
    """The path of the base model, for a folder of adapters; else None.

    Raises: ConfigError if the folder names none.
    """
    folder = Path(_find_source(path))
    config = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not config.is_file():
        return None
    try:
        base = json.loads(config.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base or Path(base) == folder:
        raise ConfigError(
            f"model.path={path}: {config.name} names no base model; write its path there as"
            " base_model_name_or_path"
        )
    return base


def _with_adapters(model: Any, path: str) -> Any:
    """A base model with the adapters of a folder added to its weights."""
    from peft import PeftModel

    with _loading(path, weights=True) as place:
        folder = place["pretrained_model_name_or_path"]
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    model.name_or_path = folder  # the base for further adapters to name
    return model


def _dequantize(model: Any) -> Any:
    """Turn a model from a GGUF file into an ordinary one: transformers cannot save it in the loaded
    form."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = type(model)._from_config(
        config, dtype=model.dtype, attn_implementation=config._attn_implementation
    )
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.eval()


def check_vocabulary(
    path: str,
    teacher: str,
    *,
    teacher_revision: str | None = None,
    key: str = "reference.path",
    rows: int = 0,
    **hub: Any,
) -> list[int] | None:
    """Check that another model can be compared with this one, token by token: it must have every
    token of this model, in any order.

    Only tokenizers and configs are read, so a wrong teacher is found before any weights are loaded.
    Equal tokens are equal bytes, since merges and decoder have to be equal too. Rows of padding
    behind the vocabulary may differ.

    Args:
      path, hub: of the policy, as in `load_policy`. teacher, teacher_revision: of the other model.
        rows: of the policy's head.
    Returns: None if equal ids mean equal tokens; else the other model's row for each id of the
      policy, for `take_rows`. Rows of the policy without a token get the other model's rows without
      a token, as far as there are any.
    Raises: ConfigError naming the `key` and the first token missing in the other model.
    """
    tokenizer = pretrained_tokenizer(path, **hub)
    try:
        other = pretrained_tokenizer(teacher, revision=teacher_revision)
        theirs_config = pretrained_config(teacher, revision=teacher_revision)
        size = read_model_shape(theirs_config.get_text_config()).vocab
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=", 1)) from error
    own = tokenizer.get_vocab()
    theirs = other.get_vocab()
    used = (
        own.values() if own == theirs else [theirs[token] for token in own.keys() & theirs.keys()]
    )
    odd = _find_odd_token(tokenizer, other) if own != theirs else ""
    if odd:
        raise ConfigError(
            f"{key}={teacher}: has another vocabulary than model.path={path} ({len(theirs)} tokens"
            f" and {len(own)}; {odd}), so its tokens mean something else; choose a model with the"
            " same tokenizer"
        )
    if size is not None and size <= max(used):
        raise ConfigError(
            f"{key}={teacher}: has {size} rows for ids up to {max(used)}; choose a model with all"
            " of them"
        )
    if own == theirs:
        return None
    tokens = {i: token for token, i in own.items()}
    spare = iter(sorted({*range(size or 0)} - {*theirs.values()}))
    found = [
        theirs[tokens[i]] if i in tokens else next(spare, None)
        for i in range(max(rows, *(i + 1 for i in tokens)))
    ]
    cut = found.index(None) if None in found else len(found)
    if cut <= max(tokens):
        raise ConfigError(
            f"{key}={teacher}: has no row for id {cut} of model.path={path}, which has no token;"
            " choose another model"
        )
    return [row for row in found[:cut] if row is not None]


def _find_odd_token(own: Any, other: Any) -> str:
    """Name the first token that the other tokenizer lacks, or say that only the rules differ; "" if
    they are alike."""
    added = own.get_added_vocab()
    others = other.get_added_vocab()
    theirs = other.get_vocab()
    for token, i in sorted(own.get_vocab().items(), key=lambda entry: entry[1]):
        if token not in theirs or (token in added) != (token in others):
            return f"the first that differs is {token!r}, id {i}"
    return "" if _rules(own) == _rules(other) else "their merges or decoders differ"


def _rules(tokenizer: Any) -> Any:
    """How a tokenizer cuts text and writes it again, without the ids."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return tokenizer  # nothing to compare: equal to itself alone
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {key: value for key, value in spec["model"].items() if key != "vocab"}
    return parts, spec["normalizer"], spec["pre_tokenizer"], spec["decoder"]


def take_rows(model: Any, ids: Sequence[int]) -> None:
    """Give a causal LM another vocabulary, in place: row i of embedding and head becomes the old
    row ids[i].

    Raises: ConfigError if the model reads ids elsewhere too.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    size = ends[0].weight.shape[0]
    moved = dict[Tensor, nn.Parameter]()
    if any(
        isinstance(m, nn.Embedding) and m not in ends and m.num_embeddings == size
        for m in model.modules()
    ):
        raise ConfigError(
            "it has further embeddings of the vocabulary, which cannot be reordered; choose a"
            " teacher with the same ids"
        )
    for layer in ends:
        for name, old in list(layer.named_parameters(recurse=False)):
            # a tied head stays tied
            new = nn.Parameter(old.detach()[list(ids)], requires_grad=old.requires_grad)
            moved.setdefault(old, new)
            setattr(layer, name, moved[old])
    ends[0].padding_idx = None
    ends[0].num_embeddings = len(ids)
    ends[1].out_features = len(ids)
    model.config.get_text_config().vocab_size = len(ids)


def check_weights(model: Any, path: str, key: str = "model.path") -> None:
    """Raise ConfigError naming the first weight with nan or infinity: no model can sample with
    one."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        fine = torch.isfinite(weight)
        if not fine.all():
            count = int(fine.numel() - fine.sum())
            raise ConfigError(
                f"{key}={path}: {count:,} of the {weight.numel():,} numbers of the weight {name}"
                " are nan or infinite; the file is damaged or comes from a run that diverged, so"
                " take another one"
            )


def _find_source(path: str) -> str:
    """The folder, file or hub id behind a model's path. Raises ConfigError for a model not fetched
    yet."""
    if path.startswith(FETCHED):
        name = path.removeprefix(FETCHED)
        folder = find_fetched_folder(name)
        if folder is None or not folder.is_dir():
            raise ConfigError(
                f"model.path={path}: this model is not on this machine. Fetch it once with"
                f" `rlkit get {name}`"
            )
        return str(folder)
    location = TINY if path in EMBEDDED else Path(path).expanduser()
    # absolute: adapters remember it as their base, and are loaded from another folder
    return str(location.absolute()) if location.exists() else path


def find_fetched_folder(name: str) -> Path | None:
    """The folder of `rlkit get NAME` for a model; None for a user without a cache folder, and for
    an invalid name."""
    cache = cache_folder()
    return cache / "models" / name if cache and re.fullmatch(r"\w+", name) else None


@contextmanager
def _loading(path: str, *, weights: bool) -> Iterator[dict[str, str]]:
    """Yield the arguments of `from_pretrained` for a model's path. Raises ConfigError if a folder
    written by rlkit has changed since (`weights`: check weight files too), or if the block cannot
    load it."""
    source = _find_source(path)
    why = find_folder_damage(Path(source), weights=weights)
    if why:
        again = (
            f"fetch it again (rlkit get {path.removeprefix(FETCHED)})"
            if path.startswith(FETCHED)
            else "export it again (rlkit export run=…)"
        )
        raise ConfigError(
            f"model.path={path}: {why}; {again}, or delete {SUMS} if you have changed the folder on"
            " purpose"
        )
    place = {"pretrained_model_name_or_path": source}
    if source.endswith(".gguf") and Path(source).is_file():
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(
                f"model.path={path}: reading this format needs the package gguf; {install('gguf')}"
            )
        file = Path(source)
        place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        yield place
    except Exception as error:
        known = isinstance(error, OSError | ValueError)
        damaged = type(error).__name__ == "SafetensorError"
        # transformers reads the keys of a GGUF file without asking whether they are there
        if not (known or damaged or "gguf_file" in place):
            raise
        said = str(error).partition("\n")[0] if known or damaged else repr(error)
        folder = Path(source)
        if source.startswith(("/", ".")) and not folder.exists():
            said = "there is no such folder or file"
        elif folder.is_dir() and not (folder / "config.json").exists():
            said = "the folder holds no config.json"
        raise ConfigError(
            f"model.path={path}: cannot be loaded ({said}). Give a local folder, or a hub id"
        ) from error


def make_policy(model: Any, tokenizer: Any, **template: Any) -> Policy:
    """Make a policy from a causal LM already built, also under PEFT, and its tokenizer.

    Args:
      template: enable_thinking, interruption, tools and render, of `make_renderer`.
    Raises: TemplateError.
    """
    return _policy(model, make_renderer(tokenizer, **template))


def _policy(model: Any, renderer: Renderer) -> Policy:
    tokenizer = renderer.tokenizer
    context = read_model_shape(model.config).context
    context = 1 << 20 if context is None else int(context)
    allow_packing(model)
    end_ids = end_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_ids[0]
    return Policy(model, renderer, end_ids, pad, context)


def remove_dropout(config: Any) -> Any:
    """The config with every dropout 0: sampler and trainer must see the same policy, or ratios are
    not 1 on the first pass."""
    for name, value in vars(config).items():
        if "dropout" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


class Adapter(nn.Linear):
    """A factor of an adapter: kept and trained in its own precision, computed in its input's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn_functional.linear(x, self.weight.to(x.dtype))


def add_lora(model: Any, lora: LoRA) -> Any:
    """The model with float32 adapters on its attention and MLP projections, computed in the base's
    precision; the base is frozen. Raises: ConfigError if no layer has the name of a target."""
    from peft import LoraConfig, get_peft_model

    names = [f".{name}" for name, _ in model.named_modules()]
    if not any(name.endswith(f".{target}") for name in names for target in lora.targets):
        linear = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        own = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"model.lora.targets={list(lora.targets)}: the model has no such layer; its linear ones"
            f" are {', '.join(own)}"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    return compute_as_base(get_peft_model(model, config, autocast_adapter_dtype=True))


def compute_as_base(adapted: Any) -> Any:
    """Make all plain adapters of a model under PEFT compute in the precision of their input, even
    adapters added later."""
    for layer in lora_layers(adapted):
        if isinstance(layer.base_layer, nn.Linear) and not layer.lora_variant:
            layer.cast_input_dtype_enabled = False  # PEFT's cast to float32
            for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
                factor.__class__ = Adapter
    return adapted


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id at the end of a reply: all of the generation config, and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise TemplateError(
            "model.path: the model names no end-of-sequence token; set eos_token_id in its"
            " generation_config.json"
        )
    return tuple(dict.fromkeys(ids))
