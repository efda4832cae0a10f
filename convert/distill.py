"""Tunes a drafter on the distributions of its target: a fine-tuned or quantized target drifts from the drafter it came with.

    python -m mlx_gemma_mtp.convert.distill --pair DIR --data FILE|DIR|- --out DIR [--minutes M | --steps N] [--rank R]

What is trained is what is run: the frozen target reads a batch of text once and gives hidden states, distributions and
its shared keys and values; the drafter makes K chained steps from every position, at that position, under the masks of
decoding. Loss: per step, the divergence from the target's distribution, and for a cluster head the cross entropy of its
clusters against the target's mass in each, so that the right cluster is among those scored.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from tqdm import tqdm

from mlx_gemma_mtp.checkpoint import read_json, read_tensors
from mlx_gemma_mtp.cluster_head import ClusterHead
from mlx_gemma_mtp.config import FULL, check_pair, load_drafter_config
from mlx_gemma_mtp.draft_length import Fixed
from mlx_gemma_mtp.drafter import Drafter, count_clusters, load_drafter
from mlx_gemma_mtp.errors import MtpError, OptionError
from mlx_gemma_mtp.hub import find, load
from mlx_gemma_mtp.pair import Pair
from mlx_gemma_mtp.sampling import Sampling
from mlx_gemma_mtp.speculative import Engine, Row, decode, prefill, stack
from mlx_gemma_mtp.target import Target
from mlx_gemma_mtp.target import load_checkpoint as load_weights
from mlx_gemma_mtp.tokenizer import Tokenizer

from .training import (
    ParallelGradients,
    PositionMask,
    Recorder,
    fast_softmax,
    load_checkpoint,
    log_sum_exp,
    make_optimizer,
    save_checkpoint,
    training_math,
)

HELD_OUT_SHARE = 1 / 16
CLUSTER_WEIGHT = 0.2
STEP_WEIGHT = 0.8  # a later draft token counts only if the earlier ones were accepted


class DataError(MtpError):
    """Training data that cannot be used; the message names file and line."""


@dataclass(frozen=True)
class Settings:
    """What decides the result of a training run, apart from pair and data.

    length: tokens of a training window.  rows: windows per step.  anchors: positions per window, the last ones, from
    which drafts are made.  draft_length: K.  rate: peak learning rate of the matrices (other weights: 0.15 of it).
    rank: of the low-rank deltas trained in place of the weights; None to train the weights.
    """

    steps: int
    length: int = 256
    rows: int = 8
    anchors: int = 256
    draft_length: int = 4
    rate: float = 0.005
    rank: int | None = None
    seed: int = 0


# Data -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """One text as ids. where: file and line for messages.  is_prompt: the target is to continue it."""

    where: str
    ids: list[int]
    is_prompt: bool = False


def read_documents(source: str, tokenizer: Tokenizer) -> list[Document]:
    """The documents in a file, a directory (all files in it) or standard input ("-").

    A .jsonl file holds one object a line: {"text": …}, {"messages": […]} or {"prompt": …}, which the target continues.
    Any other file is one plain text.
    Raises DataError.
    """
    if source == "-":
        files = [("standard input", sys.stdin.buffer.read())]
    else:
        path = Path(source)
        if not path.exists():
            raise DataError(f"{source} does not exist: give a file or directory of training texts")
        paths = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files = [(str(p), p.read_bytes()) for p in paths]
    documents = [document for name, data in files for document in _read_file(name, data, tokenizer)]
    if not documents:
        raise DataError(f"{source} holds no text: give texts to train on")
    return documents


def _read_file(name: str, data: bytes, tokenizer: Tokenizer) -> list[Document]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{name}, line {line}: not UTF-8 text: convert it to UTF-8") from None
    if not text.strip():
        raise DataError(f"{name} is empty: give texts to train on")
    if not name.endswith(".jsonl"):
        return [_document(f"{name}, line 1", text, "text", tokenizer)]
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_read_line(f"{name}, line {number}", line, tokenizer) for number, line in lines]


def _read_line(where: str, line: str, tokenizer: Tokenizer) -> Document:
    kinds = {"text": str, "messages": list, "prompt": str}
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON ({error.msg} at column {error.colno}): mend or remove the line") from None
    found = [kind for kind in kinds if isinstance(value, dict) and isinstance(value.get(kind), kinds[kind])]
    if len(found) != 1:
        raise DataError(f'{where}: needs exactly one of "text" (string), "messages" (list) and "prompt" (string)')
    return _document(where, value[found[0]], found[0], tokenizer)


def _document(where: str, value: str | list, kind: str, tokenizer: Tokenizer) -> Document:
    try:
        ids = _chat_ids(value, tokenizer) if kind == "messages" else tokenizer.encode(value, raw=True)
    except MtpError as error:
        raise DataError(f"{where}: {error}") from error
    is_prompt = kind == "prompt"
    if len(ids) - (tokenizer.bos_id is not None) < (1 if is_prompt else 2):
        raise DataError(f"{where}: {len(ids)} tokens with the one that begins every text: a text needs two or more of its own")
    return Document(where, ids, is_prompt)


def _chat_ids(messages: list, tokenizer: Tokenizer) -> list[int]:
    """A whole conversation, without the opening of another turn."""
    if tokenizer.wrapper is None or not tokenizer.wrapper.has_chat_template:
        raise DataError("this checkpoint has no chat template: give plain texts")
    try:
        text = tokenizer.wrapper.apply_chat_template(messages, tokenize=False, enable_thinking=False)
    except Exception as error:  # a template is a program of the checkpoint and may raise anything
        raise DataError(f"the chat template cannot render these messages ({error})") from error
    return tokenizer.encode(text, raw=True)


def continue_prompts(target: Target, prompts: list[list[int]], tokens: int, stop_ids=frozenset(), rows=64, done=None):
    """The target's own greedy continuations. prompts: ids.  done: called with the number of prompts finished.

    Returns prompt + continuation, at most `tokens` longer, in the order of the prompts.
    """
    engine, results = Engine(target, None), []
    for start in range(0, len(prompts), rows):
        part = prompts[start : start + rows]
        batch = [Row(list(p), tokens, stop_ids) for p in part]
        state = stack([prefill(target, p) for p in part])
        for _ in decode(engine, state, batch, Fixed(0).begin()):
            pass
        results += [p + row.tokens for p, row in zip(part, batch, strict=True)]
        if done:
            done(len(part))
    return results


def split_held_out(documents: list[list[int]]) -> tuple[np.ndarray, list[list[int]]]:
    """(training ids as one array, held-out documents): every 16th document, or the end of the only one."""
    period = min(round(1 / HELD_OUT_SHARE), len(documents))
    if len(documents) == 1:
        ids = documents[0]
        cut = max(1, int(len(ids) * (1 - HELD_OUT_SHARE)))
        return np.array(ids[:cut], np.int32), [ids[cut:]] if len(ids) - cut > 1 else [ids]
    held_out = documents[period - 1 :: period]
    training = [ids for i, ids in enumerate(documents) if i % period != period - 1]
    return np.concatenate([np.array(ids, np.int32) for ids in training]), held_out


def batch_at(stream: np.ndarray, step: int, settings: Settings) -> mx.array:
    """[rows, length] windows of the stream. Depends on (seed, step) alone, so a resumed run sees the same ones."""
    randomness = np.random.default_rng([settings.seed, step])
    starts = randomness.integers(0, len(stream) - settings.length + 1, settings.rows)
    return mx.array(np.stack([stream[s : s + settings.length] for s in starts]))


# Loss -----------------------------------------------------------------------------------------------------------------


def teach(target: Target, tokens: mx.array) -> tuple[mx.array, dict]:
    """One pass of the frozen target over ids [B, L].

    Returns hidden states [B, L, D] after the final norm, and per layer type the shared keys and values [B, G, L, E].
    """
    layers = [Recorder() for _ in target.owners]
    hidden = target.hidden(tokens, layers)
    shared = {kind: layers[target.shared_layer(kind)] for kind in set(target.owners)}
    return hidden, {kind: (layer.keys.astype(mx.float32), layer.values.astype(mx.float32)) for kind, layer in shared.items()}


def draft_chain(drafter: Drafter, embeddings: list[mx.array], hidden: mx.array, first: int, shared: dict) -> list[mx.array]:
    """Normed outputs [B, A, d] of K chained steps from A anchors side by side, at positions first .. first + A - 1.

    embeddings: K arrays [B, A, D], scaled, of the token each step starts from.  hidden: [B, A, D] the target's state that
    chose the first of them.  shared: per layer type keys and values [B, G, L, E]; an anchor sees those before itself,
    in sliding layers the last window - 1: what LayerCache.lend shows in decoding.
    """
    window, outputs = drafter.config.args.sliding_window, []
    for embedding in embeddings:
        x = drafter.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        for layer in drafter.layers:
            mask = PositionMask(None if layer.layer_type == FULL else window, first, includes_self=False)
            x, _, _ = layer(x, mask, shared_kv=shared[layer.layer_type], offset=first + drafter.position_offset)
        x = drafter.norm(x)
        outputs.append(x)
        hidden = drafter.post_projection(x)
    return outputs


def make_loss(target: Target, drafter: Drafter, settings: Settings):
    """loss(parameters, tokens [B, L]) -> scalar, the mean over anchors and draft steps. Writes into `drafter`."""
    K, A = settings.draft_length, settings.anchors
    first = settings.length - A
    head = drafter.head if isinstance(drafter.head, ClusterHead) else None
    # Where step k of an anchor has text to be judged by; an anchor at 0 would see nothing.
    position = first + mx.arange(A)
    valid = [((position > 0) & (position + k < settings.length)).astype(mx.float32) for k in range(K)]
    total = sum(STEP_WEIGHT**k * valid[k].sum().item() for k in range(K))
    mx.eval(valid)

    def loss(parameters, tokens):
        drafter.update(parameters)
        hidden, shared = teach(target, tokens)
        padded = mx.pad(tokens, [(0, 0), (0, K)])
        embeddings = [target.embed(padded[:, first + k : first + k + A]).astype(mx.float32) for k in range(K)]
        before = mx.pad(hidden, [(0, 0), (1, 0), (0, 0)])[:, first : first + A].astype(mx.float32)  # [B, A, D]
        p = teacher_distribution(target, hidden[:, first:], head)
        entropy = -(p * mx.log(p + 1e-9)).sum(-1)
        p, entropy = mx.pad(p, [(0, 0), (0, K), (0, 0)]), mx.pad(entropy, [(0, 0), (0, K)])
        result = 0.0
        for k, x in enumerate(draft_chain(drafter, embeddings, before, first, shared)):
            divergence = step_loss(drafter, x, p[:, k : k + A]) - entropy[:, k : k + A]  # [B, A]
            result = result + STEP_WEIGHT**k * (divergence * valid[k]).sum()
        return result / (tokens.shape[0] * total)

    return loss


def teacher_distribution(target: Target, hidden: mx.array, head: ClusterHead | None) -> mx.array:
    """The target's distribution [B, A, V], in the order of the drafter's output rows."""
    logits = target.logits(hidden).astype(mx.float32)
    if head is not None:
        logits = mx.take(logits, head.ordering.reshape(-1), axis=-1)
    return mx.stop_gradient(fast_softmax(logits))


def step_loss(drafter: Drafter, x: mx.array, p: mx.array) -> mx.array:
    """Cross entropy [B, A] of one step against p [B, A, V], plus that of the clusters. x: normed output [B, A, d]."""
    head = drafter.head
    if not isinstance(head, ClusterHead):
        scores = head(x).astype(mx.float32)
        return log_sum_exp(scores) - (p * scores).sum(-1)
    clusters, size = head.ordering.shape
    scores = (x @ output_table(head.tokens).T).astype(mx.float32)
    routes = head.centroids(x).astype(mx.float32)  # [B, A, C]
    mass = p.reshape(*p.shape[:-1], clusters, size).sum(-1)
    tokens_loss = log_sum_exp(scores) - (p * scores).sum(-1)
    clusters_loss = log_sum_exp(routes) - (mass * routes).sum(-1) + (mass * mx.log(mass + 1e-9)).sum(-1)
    return tokens_loss + CLUSTER_WEIGHT * clusters_loss


# Drafter in and out ---------------------------------------------------------------------------------------------------


def load_trainable(directory: Path, dtype: mx.Dtype = mx.float32) -> Drafter:
    """The drafter of a directory in the form that is trained: products not joined, floats as `dtype`, ordering frozen."""
    raw, config = load_drafter_config(directory)
    clusters = count_clusters(directory)

    class Args:  # mlx-lm builds the model from the raw config; ours is checked and complete already
        from_dict = staticmethod(lambda _: config)

    drafter = load_weights(directory, raw, lambda **_: (lambda args: Drafter(args, clusters), Args))
    drafter.set_dtype(dtype)
    if clusters:
        drafter.head.freeze(keys=["ordering"])
    mx.eval(drafter.state)
    return drafter


def hugging_face_tensors(drafter: Drafter) -> dict[str, mx.array]:
    """The tensors of a drafter, quantized or not, under the names of a Hugging Face checkpoint: undoes Drafter.sanitize."""
    clustered = isinstance(drafter.head, ClusterHead)
    ordering = drafter.head.ordering.reshape(-1) if clustered else None
    tensors = {}
    for name, value in tree_flatten(drafter.parameters()):
        part = name.split(".")[-1]
        if name == "head.ordering":
            tensors["masked_embedding.token_ordering"] = ordering.astype(mx.int64)
        elif name.startswith("head.centroids."):
            tensors["masked_embedding." + name.removeprefix("head.")] = value
        elif name.startswith("head.tokens."):
            tensors[f"model.embed_tokens.{part}"] = value.reshape(ordering.size, -1)[mx.argsort(ordering)]
        elif name.startswith("head."):
            tensors[f"model.embed_tokens.{part}"] = value
        else:
            tensors[name if "_projection" in name.split(".")[0] else "model." + name] = value
    return tensors


def output_table(module: nn.Module) -> mx.array:
    """Output rows [V, d] of a head's table, dequantized if it is quantized."""
    weight = module.weight
    if "scales" in module:
        weight = mx.dequantize(weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode)
    return weight.reshape(-1, weight.shape[-1])


def save_drafter(drafter: Drafter, source: Path, out: Path, dtype: mx.Dtype) -> None:
    """Writes out/model.safetensors, floats in `dtype`, beside the configuration files of `source`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = hugging_face_tensors(drafter)
    tensors = {n: v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v for n, v in tensors.items()}
    unfinished = out / "unfinished.safetensors"
    mx.save_safetensors(str(unfinished), tensors, {"format": "pt"})
    unfinished.replace(out / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists() and source.resolve() != out.resolve():
            shutil.copyfile(source / name, out / name)


# Measuring ------------------------------------------------------------------------------------------------------------


def measure_acceptance(pair: Pair, prompts: list[list[int]], draft_length: int, max_tokens: int = 64) -> dict:
    """Decodes every prompt greedily. Returns rounds, acceptance_length and acceptance_by_position (shares of rounds)."""
    rounds, accepted = 0, [0] * draft_length
    for prompt in prompts:
        options = {"max_tokens": max_tokens, "draft_length": draft_length, "ignore_eos": True}
        stats = pair.generate(prompt, sampling=Sampling(temperature=0), **options).stats
        rounds += stats.rounds
        for position, count in enumerate(stats.accepted_by_position):
            accepted[position] += count
    return {
        "rounds": rounds,
        "acceptance_length": round(1 + sum(accepted) / rounds, 4),
        "acceptance_by_position": [round(count / rounds, 4) for count in accepted],
    }


def measure_first_rounds(pair: Pair, prompts: list[list[int]], draft_length: int) -> dict:
    """As measure_acceptance, but one round after each prompt only.

    Long greedy texts of a small model repeat themselves, which is easily drafted; these contexts are all real text.
    """
    accepted = [0] * draft_length
    for prompt in prompts:
        stream = pair.stream(
            prompt,
            max_tokens=2 * draft_length + 2,
            draft_length=draft_length,
            sampling=Sampling(temperature=0),
            ignore_eos=True,
        )
        next(stream)  # the token of the prompt's own pass, which has no drafts
        for position in range(len(next(stream).tokens) - 1):
            accepted[position] += 1
        stream.close()
    return {
        "rounds": len(prompts),
        "acceptance_length": round(1 + sum(accepted) / len(prompts), 4),
        "acceptance_by_position": [round(count / len(prompts), 4) for count in accepted],
    }


def held_out_prompts(held_out: list[list[int]], bos_id: int | None, count: int, length: int) -> list[list[int]]:
    """`count` prompts of at most `length` tokens, spread evenly over the held-out documents."""
    stream = [token for ids in held_out for token in ids]
    length = max(1, min(length, len(stream) - 1))
    starts = np.linspace(0, len(stream) - length, count).astype(int)
    begin = [] if bos_id is None else [bos_id]
    return [begin + [t for t in stream[s : s + length] if t != bos_id] for s in sorted(set(starts.tolist()))]


# Training -------------------------------------------------------------------------------------------------------------


def add_deltas(drafter: Drafter, rank: int) -> None:
    """Puts a trainable low-rank delta on every product of the layers and projections, and freezes everything else."""
    drafter.freeze()
    products = [(path, module) for path, module in drafter.named_modules()
                if isinstance(module, (nn.Linear, nn.QuantizedLinear)) and not path.startswith("head")]  # fmt: skip
    drafter.update_modules(
        tree_unflatten([(path, LoRALinear.from_base(module, r=rank, scale=1.0)) for path, module in products])
    )


def fuse_deltas(drafter: Drafter) -> None:
    """Adds the deltas to the weights; a quantized product is quantized again as it was."""
    fused = [(path, module.fuse()) for path, module in drafter.named_modules() if isinstance(module, LoRALinear)]
    drafter.update_modules(tree_unflatten(fused))


class Run:
    """One training run, resumable: the same settings, pair and data give the same drafter, killed in between or not."""

    def __init__(self, target: Target, source: Path, stream: np.ndarray, settings: Settings, work: Path, workers: int = 1):
        """source: directory of the drafter to start from.  work: directory for the checkpoint."""
        self.target, self.source, self.stream, self.settings = target, source, stream, settings
        self.checkpoint = work / "checkpoint.safetensors"
        mx.random.seed(settings.seed)
        mx.eval(target.model.state)  # rotary frequencies too: the workers' threads cannot evaluate what is lazy here
        self.optimizer = make_optimizer(settings.rate, 0.15 * settings.rate, settings.steps)
        self.parameters = self._new_drafter().trainable_parameters()
        identity = json.dumps(asdict(settings) | {"workers": workers}) + hashlib.sha256(stream.tobytes()).hexdigest()
        self.progress = {"step": 0, "identity": hashlib.sha256(identity.encode()).hexdigest(), "curve": []}
        if self.checkpoint.exists():
            self._resume()
        self.gradients = ParallelGradients(lambda: make_loss(target, self._new_drafter(), settings), workers)

    def _new_drafter(self) -> Drafter:
        """A drafter as the source has it, with fresh deltas if deltas are trained."""
        drafter = load_trainable(self.source)
        if self.settings.rank:
            add_deltas(drafter, self.settings.rank)
        mx.eval(drafter.state)
        return drafter

    def _resume(self) -> None:
        parameters, progress = load_checkpoint(self.checkpoint, self.optimizer)
        if progress["identity"] != self.progress["identity"]:
            raise OptionError(
                f"{self.checkpoint} belongs to a run with other data or options: "
                "give the same ones to go on with it, or remove it to start anew"
            )
        self.parameters, self.progress = parameters, progress

    def steps(self, save_seconds: float = 60.0):
        """Trains; yields (step, loss) after every step, with the drafter up to date, and saves checkpoints."""
        saved = time.time()
        for step in range(self.progress["step"], self.settings.steps):
            with training_math():
                loss, gradient = self.gradients(self.parameters, batch_at(self.stream, step, self.settings))
            self.parameters = self.optimizer.apply_gradients(gradient, self.parameters)
            mx.eval(self.parameters, self.optimizer.state)
            self.progress["step"] = step + 1
            self.progress["curve"].append([step + 1, loss.item()])
            yield step + 1, loss.item()
            if time.time() - saved > save_seconds:
                saved = time.time()
                self.save()

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(self.checkpoint, self.parameters, self.optimizer, self.progress)

    def fused(self) -> Drafter:
        """A drafter of its own with what was trained so far, deltas added in."""
        drafter = self._new_drafter()
        drafter.update(self.parameters)
        fuse_deltas(drafter)
        return drafter


def memory_bytes(target: Target, settings: Settings, drafter_weights: int, workers: int) -> int:
    """What training takes at most, roughly: weights, optimizer, and the distributions over the vocabulary."""
    weights = sum(array.nbytes for _, array in tree_flatten(target.model.parameters()))
    distributions = settings.rows * settings.anchors * target.args.vocab_size * 4 * (3 * settings.draft_length + 4)
    per_token = 4 * 100 * target.args.hidden_size * target.args.num_hidden_layers
    return weights + drafter_weights * 4 * (4 + 2 * workers) + distributions + settings.rows * settings.length * per_token


def fit_anchors(target: Target, settings: Settings, budget: int) -> Settings:
    """The settings with as many anchors as keep the distributions over the vocabulary within `budget` bytes."""
    each = settings.rows * target.args.vocab_size * 4 * (3 * settings.draft_length + 4)
    return replace(settings, anchors=max(1, min(settings.length, budget // each)))


class Tuner:
    """A Run whose drafter is measured by decoding now and then; the best one is kept in `out`, the source's to start with."""

    def __init__(self, target: Target, source: Path, tokenizer: Tokenizer, prompts: list, settings: Settings, out: Path):
        self.target, self.source, self.tokenizer = target, source, tokenizer
        self.prompts, self.settings, self.out = prompts, settings, out
        self.dtype = stored_dtype(source)

    def measure(self, directory: Path) -> dict:
        pair = Pair(self.target, load_drafter(directory, self.target.dtype), self.tokenizer, directory.name)
        return measure_acceptance(pair, self.prompts, self.settings.draft_length)

    def run(self, run: Run, evaluations: int = 4) -> dict:
        """Trains to the end. Returns the report: acceptance before, after, and of the drafter that was kept."""
        progress, steps = run.progress, self.settings.steps
        if "before" not in progress:
            progress["before"] = progress["best"] = self.measure(self.source)
            progress["evaluations"] = [[0, progress["before"]["acceptance_length"]]]
            copy_drafter(self.source, self.out)
            run.save()
        print(f"before: {describe(progress['before'])}", file=sys.stderr)
        due = {steps * i // evaluations for i in range(1, evaluations + 1)}
        with tqdm(total=steps, initial=progress["step"], desc="distill", disable=None) as bar:
            for step, loss in run.steps():
                bar.update()
                bar.set_postfix(loss=f"{loss:.4f}", acceptance=progress["evaluations"][-1][1], refresh=False)
                if step in due:
                    self._evaluate(run, step)
        run.gradients.close()
        print(f"after:  {describe(progress['after'])}", file=sys.stderr)
        report = {name: progress[name] for name in ("before", "after", "best", "evaluations", "curve")}
        report |= {"settings": asdict(self.settings), "kept": "source" if report["best"] == report["before"] else "tuned"}
        (self.out / "distill.json").write_text(json.dumps(report, indent=1))
        return report

    def _evaluate(self, run: Run, step: int) -> None:
        candidate = run.checkpoint.parent / "candidate"
        save_drafter(run.fused(), self.source, candidate, self.dtype)
        run.progress["after"] = measured = self.measure(candidate)
        run.progress["evaluations"].append([step, measured["acceptance_length"]])
        if measured["acceptance_length"] > run.progress["best"]["acceptance_length"]:
            run.progress["best"] = measured
            copy_drafter(candidate, self.out)
        run.save()


def copy_drafter(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            shutil.copyfile(path, out / path.name)


def stored_dtype(directory: Path) -> mx.Dtype:
    """The floating type of a drafter's weights in its file."""
    names = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    found = [names[t.dtype] for t in read_tensors(directory).values() if t.dtype in names]
    return found[0] if found else mx.float32


def describe(measured: dict) -> str:
    by_position = " ".join(f"{share:.0%}" for share in measured["acceptance_by_position"])
    return f"{measured['acceptance_length']:.3f} tokens per round in {measured['rounds']} rounds (by position {by_position})"


def draw_curve(report: dict, path: Path) -> bool:
    """Loss and held-out acceptance over steps as a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4))
    losses = figure.subplots()
    losses.plot(*zip(*report["curve"], strict=True), color="tab:blue", linewidth=0.8)
    losses.set(xlabel="step", ylabel="loss")
    acceptance = losses.twinx()
    acceptance.plot(*zip(*report["evaluations"], strict=True), color="tab:red", marker="o")
    acceptance.set_ylabel("held-out acceptance length")
    figure.savefig(path, dpi=120)
    return True


# Command line ---------------------------------------------------------------------------------------------------------


def training_sequences(target: Target, tokenizer: Tokenizer, documents: list[Document], continuation: int) -> list[list[int]]:
    """Ids of every document; prompts with the target's continuation."""
    prompts = [d.ids for d in documents if d.is_prompt]
    if not prompts:
        return [d.ids for d in documents]
    with tqdm(total=len(prompts), desc="continue prompts", disable=None) as bar:
        texts = iter(continue_prompts(target, prompts, continuation, tokenizer.stop_ids, done=bar.update))
    return [next(texts) if d.is_prompt else d.ids for d in documents]


def seconds_per_step(target: Target, source: Path, stream: np.ndarray, settings: Settings, workers: int) -> float:
    """Measured on a run that is thrown away; the first step, which compiles, does not count."""
    run = Run(target, source, stream, replace(settings, steps=4), Path("/nonexistent"), workers)
    times = [time.time() for _ in run.steps(save_seconds=1e9)]
    run.gradients.close()
    return (times[-1] - times[0]) / (len(times) - 1)


def distill(options: argparse.Namespace) -> dict:
    """The command, with parsed options. Raises MtpError."""
    directory, source = find(options.pair, options.drafter or "auto")
    out = Path(options.out)
    if out.resolve() == source.resolve():
        raise OptionError(f"--out {out} is the drafter to be tuned: give another directory")
    if "quantization" in read_json(source / "config.json") and not options.rank:
        raise OptionError(f"{source} is quantized: give --rank, or tune the drafter it was made from")
    plain = load(directory, None)
    target, tokenizer = plain.target, plain.tokenizer
    check_pair(target.args, load_drafter_config(source)[1])
    documents = read_documents(options.data, tokenizer)
    sequences = training_sequences(target, tokenizer, documents, options.continuation)
    stream, held_out = split_held_out(sequences)
    length = min(options.length, len(stream))
    if length <= options.draft_length + 1:
        raise DataError(f"{options.data} holds {len(stream)} tokens to train on: give at least {options.draft_length + 2}")
    settings = fit_anchors(target, Settings(options.steps or 0, length, options.rows, length, options.draft_length,
                                            options.rate, options.rank, options.seed), options.memory << 30)  # fmt: skip
    weights = sum(t.size for t in read_tensors(source).values())
    print(f"{len(stream):,} tokens to train on, {sum(map(len, held_out)):,} held out; about "
          f"{memory_bytes(target, settings, weights, options.workers) / 1e9:.1f} GB of memory", file=sys.stderr)  # fmt: skip
    if not options.steps:
        settings = replace(settings, steps=planned_steps(options, out, target, source, stream, settings))
    prompts = held_out_prompts(held_out, tokenizer.bos_id, options.prompts, options.length)
    run = Run(target, source, stream, settings, out / "work", options.workers)
    report = Tuner(target, source, tokenizer, prompts, settings, out).run(run)
    if not draw_curve(report, out / "curve.png"):
        print('no curve.png: pip install "mlx-gemma-mtp[train]" for matplotlib', file=sys.stderr)
    return report


def planned_steps(options, out: Path, target: Target, source: Path, stream: np.ndarray, settings: Settings) -> int:
    """Steps that take --minutes; written down, so that a resumed run has the same schedule."""
    plan = out / "work" / "plan.json"
    if plan.exists():
        return json.loads(plan.read_text())["steps"]
    each = seconds_per_step(target, source, stream, settings, options.workers)
    steps = max(4, round(options.minutes * 60 / each))
    plan.parent.mkdir(parents=True, exist_ok=True)
    plan.write_text(json.dumps({"steps": steps, "seconds_per_step": each}))
    return steps


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlx_gemma_mtp.convert.distill", description=__doc__.split("\n")[0])
    parser.add_argument("--pair", required=True, help="directory with target/ and drafter/, or a target with --drafter")
    parser.add_argument("--drafter", help="directory of the drafter to start from (default: the pair's)")
    parser.add_argument("--data", required=True, help="text or .jsonl file, a directory of them, or - for standard input")
    parser.add_argument("--out", required=True, help="directory for the tuned drafter; a killed run goes on from it")
    time_or_steps = parser.add_mutually_exclusive_group()
    time_or_steps.add_argument("--minutes", type=float, default=10.0, help="how long to train (default 10)")
    time_or_steps.add_argument("--steps", type=int, help="how many steps to train")
    parser.add_argument("--rank", type=int, help="train low-rank deltas of this rank instead of the weights")
    parser.add_argument("--length", type=int, default=256, help="tokens of a training window (default 256)")
    parser.add_argument("--rows", type=int, default=8, help="windows per step (default 8)")
    parser.add_argument("--draft-length", type=int, default=4, help="chained draft steps (default 4)")
    parser.add_argument("--rate", type=float, default=0.005, help="peak learning rate (default 0.005)")
    parser.add_argument("--continuation", type=int, default=128, help="tokens the target adds to a prompt (default 128)")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts to measure acceptance on (default 24)")
    parser.add_argument("--memory", type=int, default=2, help="GiB for distributions over the vocabulary (default 2)")
    parser.add_argument("--workers", type=int, default=1, help="threads that share a batch, of use on a CPU (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    try:
        report = distill(parser.parse_args(arguments))
    except MtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kept = "the tuned drafter" if report["kept"] == "tuned" else "no gain: the drafter it started from"
    print(f"kept {kept}: {describe(report['best'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
