"""Load a Policy by a model's name: weights, tokenizer, chat template and LoRA adapters."""

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
# model.path → VARIANT of the file model.VARIANT.safetensors in the folder TINY; None: the file
# model.safetensors
EMBEDDED = {"tiny": None, "tiny_guess": "guess_number"}
FETCHED = "get:"  # prefix of model.path for a model fetched by `rlkit get`


@safe("targets")
@ranges(rank=(0, None), alpha=(1, None))
class LoRA(NamedTuple):
    """Train low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Their dropout is 0, because the
    sampler and the trainer must see the same policy.

    With rank 0 there are no adapters, and all weights are trained.
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
    """Load a causal LM for training.

    Args:
      path: "tiny" or "tiny_guess" (shipped with rlkit), a local folder, a GGUF file, a hub id, or
        "get:NAME" for a model fetched by `rlkit get NAME`. For a folder of adapters, their base
        model is loaded, and the adapters are added to its weights.
      revision: revision of a hub id. A commit makes the run reproducible.
      dtype: type of the base weights. "auto" is bfloat16 under LoRA on a GPU (the adapters stay
        float32), and float32 otherwise. Trained weights must be float32, because updates at
        reinforcement-learning rates are too small to change bfloat16 weights.
      attention: name of an attention implementation of transformers (sdpa, eager,
        flash_attention_2).
      head_precision: "float32" computes logits in float32 even if the base has a narrower type.
        This holds in training and in rlkit's own engines. vLLM keeps its own precision.
      gradient_checkpointing: True recomputes activations in the backward pass. This takes less
        memory and about a third more time. "auto" loads the model as False does; a training run
        later switches checkpointing on if the memory is too small without it
        (rlkit.training.activations).
      lora: the adapters to train; rank 0 trains all weights.
      enable_thinking: passed to the chat template; None leaves the template's default.
      interruption: the text written before the closing tag when generation.max_thinking_tokens is
        used up. It is not trained on.
      chat_template: a file with a template to replace the tokenizer's template.
      tools: the template that writes tools into prompts. "template": the model's own template.
        "prompt": rlkit's tool prompt, put in front of the model's template. "auto": the model's
        template if it mentions tools, else the tool prompt.
      trust_remote_code: run the model's own code. This needs a pinned revision.
      kernel: the code for updates on a CPU. "fused": compiled C (fused.py). "eager": calls of
        torch. "auto": fused if possible, else eager.
      device: the device of the weights.
    Raises: ConfigError or TemplateError naming the config key whose value to change.
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
    # before the weights are loaded, so a tokenizer without a template is refused early
    renderer = make_renderer(
        tokenizer, enable_thinking=enable_thinking, interruption=interruption, tools=tools
    )
    model = pretrained_model(
        path, dtype=torch.bfloat16 if half else torch.float32, attention=attention, **hub
    )
    model.to(device)
    check_weights(model, path)
    if head_precision == "float32":
        # change the layer's class, so Hugging Face's own forward also computes logits in float32
        model.get_output_embeddings().__class__ = Float32Head
    if lora.rank > 0:
        model = add_lora(model, lora)
    # only after the adapters: PEFT hooks into the embeddings of a model that already recomputes
    checkpoint_activations(model, gradient_checkpointing is True)
    choose_kernel(model, kernel)
    # gradient checkpointing works only in training mode; engines sample in evaluation mode
    model.train()
    return _policy(model, renderer)


def pretrained_tokenizer(path: str, **hub: Any) -> Any:
    """Load the tokenizer at a model's path. A folder of adapters without a tokenizer has that of
    its base.

    Raises: ConfigError if the tokenizer is missing, or if one of its files is damaged.
    """
    from transformers import AutoTokenizer

    base = find_adapters_base(path)
    if base is not None and not Path(_find_source(path), "tokenizer_config.json").exists():
        return pretrained_tokenizer(base, **hub)
    with _loading(path, weights=False) as place:
        return AutoTokenizer.from_pretrained(**place, **hub)


def pretrained_config(path: str, **hub: Any) -> Any:
    """Load the config at a model's path, without reading any weights.

    Raises: ConfigError if the config is missing or damaged.
    """
    from transformers import AutoConfig

    base = find_adapters_base(path)
    if base is not None:
        return pretrained_config(base, **hub)
    with _loading(path, weights=False) as place:
        return AutoConfig.from_pretrained(**place, **hub)


def pretrained_model(
    path: str, *, dtype: torch.dtype | str, attention: str = "sdpa", **hub: Any
) -> Any:
    """Load the causal LM at a model's path, without dropout.

    Args:
      dtype: type of the weights; "auto" is the type they were saved in.
    Raises: ConfigError if the model cannot be loaded, or if a file has changed since `save_policy`
    wrote it.
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
    model = _dequantize(model) if "gguf_file" in place else model
    if EMBEDDED.get(path) or "gguf_file" in place:
        # adapters name this as their base, and the folder alone holds other weights
        model.name_or_path = path if path in EMBEDDED else _find_source(path)
    return model


def find_adapters_base(path: str, above: tuple[Path, ...] = ()) -> str | None:
    """Return the path of the base model for a folder of adapters. Return None for any other path.
    The base may be a folder of adapters itself.

    Args:
      above: the folders of adapters whose base, or base of a base, this path is.
    Raises: ConfigError if the folder of adapters names no base model.
    """
    folder = Path(_find_source(path))
    config = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not config.is_file():
        return None
    try:
        base = json.loads(config.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base or folder in above:
        raise ConfigError(
            f"model.path={path}: {config.name} leads to no base model; write its path there as"
            " base_model_name_or_path"
        )
    find_adapters_base(base, (*above, folder))  # refuses folders that name one another
    return base


def _with_adapters(model: Any, path: str) -> Any:
    """Return the base model with the adapters of a folder added to its weights."""
    from peft import PeftModel

    with _loading(path, weights=True) as place:
        folder = place["pretrained_model_name_or_path"]
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    model.name_or_path = folder  # adapters trained on this model name this folder as their base
    return model


def _dequantize(model: Any) -> Any:
    """Turn a model from a GGUF file into an ordinary model. transformers cannot save a model in the
    form it loads from GGUF."""
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
    """Check that a teacher can be compared with the policy, token by token. The teacher's
    vocabulary must have every token of the policy's, in any order.

    Only tokenizers and configs are read, so a wrong teacher is found before any weights are loaded.
    The tokenizers' merges and decoders must also be equal, so equal tokens stand for equal bytes.
    The number of padding rows after the vocabulary may differ.

    Args:
      path, hub: the policy's path and settings, as in `load_policy`.
      teacher, teacher_revision: the teacher's path and revision.
      key: the config key of the teacher, for messages.
      rows: number of rows in the policy's head.
    Returns: None if an id means the same token in both models. Otherwise a list for `take_rows`:
    the number of the teacher's row for each id of the policy. An id of the policy without a token
    gets one of the teacher's rows without a token, as long as any are left.
    Raises: ConfigError naming the `key` and the first token missing in the teacher's vocabulary.
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
    """Describe the first token of `own` that is missing in `other`. If no token is missing, say
    that only the tokenizers' rules differ. Return "" if the rules are equal too."""
    added = own.get_added_vocab()
    others = other.get_added_vocab()
    theirs = other.get_vocab()
    for token, i in sorted(own.get_vocab().items(), key=lambda entry: entry[1]):
        if token not in theirs or (token in added) != (token in others):
            return f"the first that differs is {token!r}, id {i}"
    return "" if _rules(own) == _rules(other) else "their merges or decoders differ"


def _rules(tokenizer: Any) -> Any:
    """Return a tokenizer's rules for splitting text and for writing it again, without its ids."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return tokenizer  # its rules are unknown, so it is equal only to itself
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {key: value for key, value in spec["model"].items() if key != "vocab"}
    return parts, spec["normalizer"], spec["pre_tokenizer"], spec["decoder"]


def take_rows(model: Any, ids: Sequence[int]) -> None:
    """Reorder the vocabulary of a causal LM, in place. The new row i of the embedding and of the
    head is the old row ids[i].

    Raises: ConfigError if the model has further embeddings of token ids.
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
            # a head tied to the embedding stays tied
            new = nn.Parameter(old.detach()[list(ids)], requires_grad=old.requires_grad)
            moved.setdefault(old, new)
            setattr(layer, name, moved[old])
    ends[0].padding_idx = None
    ends[0].num_embeddings = len(ids)
    ends[1].out_features = len(ids)
    model.config.get_text_config().vocab_size = len(ids)


def check_weights(model: Any, path: str, key: str = "model.path") -> None:
    """Raise ConfigError naming the first weight with nan or infinity. No model can sample with such
    a weight."""
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
    """Return the folder, the file or the hub id from which a model's path is loaded.

    Raises: ConfigError for a model that has not been fetched yet.
    """
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
    # An absolute path: adapters store it as the path of their base, and a process in another folder
    # may load them.
    return str(location.absolute()) if location.exists() else path


def find_fetched_folder(name: str) -> Path | None:
    """Return the folder of a model fetched by `rlkit get NAME`. Return None if the user has no
    cache folder, or if the name is invalid."""
    cache = cache_folder()
    return cache / "models" / name if cache and re.fullmatch(r"\w+", name) else None


@contextmanager
def _loading(path: str, *, weights: bool) -> Iterator[dict[str, str]]:
    """Yield the arguments of `from_pretrained` for a model's path, for the block of a `with`
    statement.

    Args:
      weights: True also checks the weight files for changes.
    Raises: ConfigError if a folder written by rlkit has been changed, or if the code in the block
    cannot load the model.
    """
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
        # a GGUF file may lack keys, and transformers reads them unchecked, so any error may occur
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
    """Make a policy from a tokenizer and a causal LM already in memory, with or without PEFT's
    wrapper.

    Args:
      template: enable_thinking, interruption, tools and render of `make_renderer`.
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
    """Set every dropout in the config to 0. Otherwise the sampler and the trainer would see
    different policies, and ratios would not be 1 on the first pass."""
    for name, value in vars(config).items():
        # GPT-2 and others have attn_pdrop, embd_pdrop and resid_pdrop
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


class Adapter(nn.Linear):
    """Hold one of the two factors of an adapter. The weights have their own precision in memory and
    in training. The computation is in the precision of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return nn_functional.linear(x, self.weight.to(x.dtype))


def add_lora(model: Any, lora: LoRA) -> Any:
    """Add float32 adapters to the attention and MLP projections of a model, and freeze the model's
    own weights. The adapters compute in the precision of the model's own weights.

    A target that no layer has is named in a warning. Raises: ConfigError if the model has none of
    the targets.
    """
    from peft import LoraConfig, get_peft_model

    names = [f".{name}" for name, _ in model.named_modules()]
    missing = [t for t in lora.targets if not any(name.endswith(f".{t}") for name in names)]
    if missing:
        linear = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        own = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        said = (
            f"model.lora.targets={list(lora.targets)}: the model has no layer {', '.join(missing)};"
            f" its linear ones are {own}"
        )
        if len(missing) == len(lora.targets):
            raise ConfigError(said)
        print(f"warning: {said}; only the others get adapters", flush=True)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    return compute_as_base(get_peft_model(model, config, autocast_adapter_dtype=True))


def compute_as_base(adapted: Any) -> Any:
    """Make all plain adapters of a PEFT model compute in the precision of their input, without
    PEFT's cast to float32. Call this again after adding another adapter to the model."""
    for layer in lora_layers(adapted):
        if isinstance(layer.base_layer, nn.Linear) and not layer.lora_variant:
            layer.cast_input_dtype_enabled = False  # switches PEFT's cast to float32 off
            for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
                factor.__class__ = Adapter
    return adapted


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every id that can end a reply: all end-of-sequence ids of the generation config, and
    the tokenizer's."""
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
