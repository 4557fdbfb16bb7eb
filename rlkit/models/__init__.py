"""Load policies, talk to a policy in token ids, and score tokens under a policy.

Each file imports only files before it in this list: _template_child, chat, compiled, confined,
save, shape, head, fused, checkpointing, packing, load, log_probs, critic.
"""

from rlkit.models.chat import (
    Renderer,
    check_template,
    continuation,
    decode,
    encode_prompt,
    encode_text,
    has_tool_prompt,
    make_renderer,
)
from rlkit.models.critic import HeadCritic, SeparateCritic, ValueHead, make_critic
from rlkit.models.load import (
    LoRA,
    add_lora,
    check_vocabulary,
    load_policy,
    make_policy,
    pretrained_model,
    pretrained_tokenizer,
)
from rlkit.models.log_probs import forward_logprobs
from rlkit.models.packing import Packed, pack
