"""The target of the demo pair: the structure of Gemma 4 E2B in small, its training, its Hugging Face directory."""

import json
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from tokenizers import Tokenizer
from tqdm import tqdm

from .demo_text import BOS, EOS, PAD, SPECIAL_TOKENS, TOOL_RESPONSE, TURN_END, VOCABULARY
from .training import (
    ParallelGradients,
    Recorder,
    fast_exp,
    load_checkpoint,
    make_optimizer,
    save_checkpoint,
    training_math,
)

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
COMMON_CONFIG = dict(
    model_type="gemma4_text", vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
    global_head_dim=64, sliding_window=64, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_parameters=ROPE,
    attention_k_eq_v=False, attention_bias=False, attention_dropout=0.0, enable_moe_block=False, num_experts=None,
    top_k_experts=None, moe_intermediate_size=None, hidden_activation="gelu_pytorch_tanh", initializer_range=0.02,
    use_cache=True, use_bidirectional_attention=None, tie_word_embeddings=True,
    bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
)  # fmt: skip
TARGET_CONFIG = COMMON_CONFIG | dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_kv_shared_layers=4, use_double_wide_mlp=True,
    hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=30.0,
    layer_types=[SLIDING, SLIDING, SLIDING, FULL] * 2,
)  # fmt: skip
KV_OWNERS = TARGET_CONFIG["num_hidden_layers"] - TARGET_CONFIG["num_kv_shared_layers"]


class Lookahead(nn.Module):
    """Predicts the token after next from a hidden state and the next token; used in training only, then thrown away.

    Its small loss makes the target keep in its hidden state what a drafter will need.
    Source: Gloeckle et al. 2024; DeepSeek-V3 2024 (section 2.2).
    """

    def __init__(self, hidden_size):
        super().__init__()
        self.gate = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.up = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)

    def __call__(self, hidden, embedding):
        """hidden [B, T, D] after the final norm, embedding [B, T, D] of the following token. Returns [B, T, D]."""
        x = mx.concatenate([embedding, hidden], axis=-1)
        return self.norm(hidden + self.down(gemma4_text.geglu(self.gate(x), self.up(x))))


class Trainee(nn.Module):
    """The target and its throw-away lookahead."""

    def __init__(self):
        super().__init__()
        names = gemma4_text.ModelArgs.__dataclass_fields__
        self.target = gemma4_text.Model(
            gemma4_text.ModelArgs(**{k: v for k, v in TARGET_CONFIG.items() if k in names}))  # fmt: skip
        self.lookahead = Lookahead(TARGET_CONFIG["hidden_size"])
        mx.eval(self.state)  # rotary frequencies too: arrays left lazy here could not be used in another thread

    def losses(self, tokens):
        """tokens [B, T+2]. Returns (mean negative log likelihood of the next token, of the one after)."""
        body = self.target.model
        hidden = body(tokens[:, :-2], cache=[Recorder() for _ in range(KV_OWNERS)])  # [B, T, D]
        following = body.embed_tokens(tokens[:, 1:-1]) * body.embed_scale
        further = self.lookahead(hidden, following)
        head = body.embed_tokens.as_linear
        return negative_log_likelihood(head(hidden), tokens[:, 1:-1]), negative_log_likelihood(head(further), tokens[:, 2:])


def negative_log_likelihood(logits, tokens, cap=30.0):
    """logits [..., V] before the soft cap, tokens [...]. The cap bounds them, so that no maximum need be subtracted."""
    logits = gemma4_text.logit_softcap(cap, logits)
    chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return (mx.log(fast_exp(logits).sum(-1)) - chosen).mean()


def target_batch(stream, step, seed, tokens_per_step=4096, long=1024, short=256):
    """[rows, length + 2] windows of the stream; every fifth batch holds long ones. Depends on (seed, step) alone."""
    length = long if step % 5 == 4 else short
    randomness = np.random.default_rng([seed, step])
    starts = randomness.integers(0, len(stream) - length - 2, tokens_per_step // length)
    return mx.array(np.stack([stream[s : s + length + 2] for s in starts]))


def train_target(stream, held_out, work, seed, steps, workers):
    """Trains the target for `steps` steps, from its checkpoint in `work` if there is one. Returns the Trainee."""
    mx.random.seed(seed)
    trainee, optimizer = Trainee(), make_optimizer(0.02, 0.003, steps)
    parameters, progress = trainee.trainable_parameters(), {"step": 0, "seconds": 0.0, "curve": []}
    checkpoint = Path(work) / "target_checkpoint.safetensors"
    if checkpoint.exists():
        parameters, progress = load_checkpoint(checkpoint, optimizer)

    def make_loss():
        model = Trainee()

        def loss(parameters, tokens):
            model.update(parameters)
            following, further = model.losses(tokens)
            return following + 0.2 * further

        return loss

    gradients = ParallelGradients(make_loss, workers)
    started = saved = time.time()
    with training_math(), tqdm(total=steps, initial=progress["step"], desc="target", mininterval=5) as bar:
        for step in range(progress["step"], steps):
            loss, gradient = gradients(parameters, target_batch(stream, step, seed))
            parameters = optimizer.apply_gradients(gradient, parameters)
            mx.eval(parameters, optimizer.state)
            bar.update()
            if step % 10 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if (step + 1) % 100 == 0 or step + 1 == steps:
                trainee.update(parameters)
                progress["curve"].append([step + 1, loss.item(), *target_loss(trainee, held_out)])
                tqdm.write(f"step, loss, held-out loss (next, after next): {progress['curve'][-1]}")
            if time.time() - saved > 60 or step + 1 == steps:
                saved = time.time()
                state = progress | {"step": step + 1, "seconds": progress["seconds"] + saved - started}
                save_checkpoint(checkpoint, parameters, optimizer, state)
    gradients.close()
    trainee.update(parameters)
    return trainee


def target_loss(trainee, held_out, rows=16, length=512):
    """Held-out losses (next token, the one after) on windows spread evenly over the held-out stream."""
    starts = np.linspace(0, len(held_out) - length - 2, rows).astype(int)
    with training_math():
        losses = [trainee.losses(mx.array(held_out[None, s : s + length + 2])) for s in starts]
        mx.eval(losses)
    return [sum(loss[i].item() for loss in losses) / rows for i in range(2)]


CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}{{ raise_exception('the demo pair knows no tools') }}{% endif -%}
{%- macro text(content) -%}
    {%- if content is string %}{{ content | trim }}{% else -%}
    {%- for part in content %}{{ part['text'] | trim }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- macro without_thoughts(content) -%}
    {%- for part in content.split('<channel|>') %}{{ part.split('<|channel>')[0] }}{% endfor -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if has_system or enable_thinking -%}
    {{- '<|turn>system\n' -}}
    {%- if enable_thinking %}{{ '<|think|>\n' }}{% endif -%}
    {%- if has_system %}{{ text(messages[0]['content']) }}{% endif -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
    {%- if message['role'] == 'assistant' or message['role'] == 'model' -%}
        {{- '<|turn>model\n' + (without_thoughts(text(message['content'])) | trim) + '<turn|>\n' -}}
    {%- else -%}
        {{- '<|turn>' + message['role'] + '\n' + text(message['content']) + '<turn|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif -%}
"""


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_target(model: nn.Module, tokenizer: Tokenizer, out: Path) -> None:
    """out/target as a Hugging Face directory: bfloat16 weights, configuration, tokenizer, chat template."""
    out = out / "target"
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("model.", "model.language_model.", 1): array.astype(mx.bfloat16)
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(out / "model.safetensors"), tensors, {"format": "pt"})
    stop_ids = [EOS, TURN_END, TOOL_RESPONSE]
    write_json(out / "config.json", {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
        "vocab_size": VOCABULARY, "eos_token_id": stop_ids[:2], "tie_word_embeddings": True, "text_config": TARGET_CONFIG,
    })  # fmt: skip
    write_json(out / "generation_config.json", {
        "bos_token_id": BOS, "eos_token_id": stop_ids, "pad_token_id": PAD, "do_sample": False,
    })  # fmt: skip
    names = ["sot", "eot", "soc", "eoc", "think", "std", "etd", "stc", "etc", "str", "etr", "escape"]
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "padding_side": "left",
        "model_max_length": TARGET_CONFIG["max_position_embeddings"],
        "extra_special_tokens": {f"{name}_token": token for name, token in zip(names, SPECIAL_TOKENS[4:], strict=True)},
    })  # fmt: skip
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
