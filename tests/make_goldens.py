"""Records what transformers computes on the pairs of pairs.py, and on one real pair, into tests/goldens/*.json.

    python -m venv reference && reference/bin/pip install torch transformers==5.24.0 numpy
    reference/bin/python tests/make_goldens.py                     # the random pairs, some minutes
    reference/bin/python tests/make_goldens.py --family e2b        # one family
    reference/bin/python tests/make_goldens.py --real PAIR --text FILE...     # PAIR/target, PAIR/assistant

Target tokens are those of transformers' plain greedy generation, past any stop id. Draft tokens are those of its
assistant module, called as its candidate generator calls it, but given committed keys only: all those before the
pending token for the full layer, the last W - 1 of them for the sliding layers, the pending token's position for every
draft. transformers' own assisted generation is not used: it keeps keys of rejected tokens.

Draft tokens depend on committed tokens alone, and those are the target's greedy tokens. So one forward pass over prompt
and tokens holds the keys and hidden states of every round, and `drafts[i]`, what is drafted while tokens[i] is pending,
is recorded for every i: whatever lengths a test accepts, each of its rounds has its golden.

Every recorded choice is clear of a tie, so that the order of a sum cannot change it: prompts whose path comes close to
one are replaced, draft tokens that do are null, and so are those after them in the same chain.
"""

import argparse
import copy
import json
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pairs
import torch
import transformers

SEEDS = (1, 2, 3)
VOCAB = 512
# A window of 16 is crossed exactly, by 1 and by up to 7 (the longest draft) on both sides; 150 tokens are more than two
# prefill chunks of 64.
LENGTHS = (1, 2, 3, *range(8, 19), 23, 24, 25, 31, 32, 33, 150)
LONGER = (16, 150)  # prompts of these lengths get 48 tokens instead of 40
DRAFTED = (1, 5, 14, 24, 150)  # prompts of these lengths get drafts, for the first seed
DRAFT_LENGTH = 7
TARGET_MARGIN, DRAFT_MARGIN, CHOICE_MARGIN = 2e-3, 5e-4, 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=pairs.FAMILIES, help="one family instead of all")
    parser.add_argument("--real", type=Path, help="a directory with target/ and assistant/: writes real.json only")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files to cut prompts from, for --real")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "goldens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # faster than more, at these sizes
    torch.set_grad_enabled(False)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    arguments.out.mkdir(exist_ok=True)
    if arguments.real:
        write(arguments.out / "real.json", real_golden(arguments.real, arguments.text))
        return
    for family in [arguments.family] if arguments.family else pairs.FAMILIES:
        write(arguments.out / f"{family}.json", family_golden(family))


# --- what is recorded


def family_golden(family: str) -> dict:
    golden = {
        "family": family,
        "vocab": VOCAB,
        "window": pairs.WINDOW,
        "transformers": transformers.__version__,
        "draft_length": DRAFT_LENGTH,
        "cases": [],
    }
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as directory:
            pairs.write_pair(Path(directory), family, seed, vocab=VOCAB)
            target, drafter = load(Path(directory) / "target"), load(Path(directory) / "assistant")
        lengths = sorted({*LENGTHS, *DRAFTED}) if seed == SEEDS[0] else LENGTHS
        for length in lengths:
            case = random_case(target, seed, length, 48 if length in LONGER else 40)
            if length in (1, 16, 150):
                case["logits"] = some_logits(target, case)
            if seed == SEEDS[0] and length in DRAFTED:
                case |= drafted(target, drafter, case)
            golden["cases"].append({"seed": seed} | case)
    report(family, golden["cases"])
    return golden


def random_case(target, seed: int, length: int, new_tokens: int) -> dict:
    """The first random prompt of that length whose greedy path is varied and stays clear of ties."""
    for attempt in range(100):
        prompt = np.random.default_rng([seed, length, attempt]).integers(3, VOCAB, length).tolist()
        case = greedy(target, prompt, new_tokens)
        if case["margin"] > TARGET_MARGIN and len(set(case["tokens"])) >= new_tokens // 3:
            return case
    raise SystemExit(f"no prompt of {length} tokens has a clear and varied path: change the scale of the weights")


def real_golden(pair: Path, texts: list[Path]) -> dict:
    """Prompts of 24, 60, 63 and 200 tokens, one a text file, from its first line that gives a path clear of ties."""
    target, drafter = load(pair / "target"), load(pair / "assistant")
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair / "target")
    window = target.config.get_text_config().sliding_window
    golden = {"window": window, "transformers": transformers.__version__, "draft_length": DRAFT_LENGTH, "cases": []}
    for length, path in zip((24, 60, 63, 200), texts, strict=True):
        lines = path.read_text().splitlines(keepends=True)
        for start in range(0, len(lines), 20):
            ids = tokenizer("".join(lines[start:]), add_special_tokens=False)["input_ids"]
            case = greedy(target, [tokenizer.bos_token_id, *ids[: length - 1]], 64)
            if case["margin"] > TARGET_MARGIN and len(set(case["tokens"])) >= 16:
                case |= drafted(target, drafter, case)
                if all(token is not None for row in case["drafts"] for token in row[:4]):
                    break
        golden["cases"].append(case)
    report("real", golden["cases"])
    totals = [sum(case["accepted_by_position"][i] for case in golden["cases"]) for i in range(4)]
    print("real: accepted by position", totals, "in", sum(len(case["rounds"]) for case in golden["cases"]), "rounds")
    return golden


def drafted(target, drafter, case: dict) -> dict:
    """Draft tokens for every pending token, and the reference loop's rounds at K = 4.

    A round is [i, n]: tokens[i] was pending, n of drafts[i][:4] were accepted, tokens[i + n + 1] is pending next. Rounds
    end where the next one's four draft tokens could not all be compared with recorded target tokens.
    """
    drafts, margin = draft_tokens(target, drafter, case["prompt"], case["tokens"])
    rounds, accepted, i = [], [0] * 4, 0
    while i + 4 < len(case["tokens"]):
        n = 0
        while n < 4 and drafts[i][n] == case["tokens"][i + n + 1]:
            accepted[n] += 1
            n += 1
        rounds.append([i, n])
        i += n + 1
    return {"drafts": drafts, "draft_margin": margin, "rounds": rounds, "accepted_by_position": accepted}


def some_logits(target, case: dict) -> dict:
    """Logits after the prompt and after the last token, at eight ids spread over the vocabulary."""
    ids = sorted({*range(7, VOCAB, VOCAB // 7), case["tokens"][0]})[:8]
    logits = forward(target, case["prompt"] + case["tokens"])[0]
    rows = {"first": len(case["prompt"]) - 1, "last": -1}
    return {"ids": ids} | {name: [round(x, 5) for x in logits[row, ids].tolist()] for name, row in rows.items()}


# --- what transformers computes


def load(directory: Path):
    config = transformers.AutoConfig.from_pretrained(directory)
    model, info = getattr(transformers, config.architectures[0]).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: names for key, names in info.items() if names}
    assert not wrong, f"{directory}: {wrong}"
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no stop ids, no sampling
    return model.eval()


def greedy(target, prompt: list[int], new_tokens: int) -> dict:
    """Plain greedy generation: prompt, tokens, and by how much the closest choice on the way was clear of a tie."""
    ids = torch.tensor([prompt])
    with choice_margins(target) as choices:
        tokens = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)[
            0, len(prompt) :
        ].tolist()
    assert len(tokens) == new_tokens
    logits = forward(target, prompt + tokens)[0][len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens or gap(logits, 1) < TARGET_MARGIN
    margin = gap(logits, 1) if min(choices, default=1) > CHOICE_MARGIN else 0.0
    return {"prompt": prompt, "tokens": tokens, "margin": round(margin, 5)}


def forward(target, ids: list[int]):
    """One pass without a cache: logits [T, V], hidden states after the final norm [1, T, D], shared K/V by layer type."""
    ids = torch.tensor([ids])
    output = target(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    return output.logits[0], output.hidden_states[-1], output.shared_kv_states


def draft_tokens(target, drafter, prompt: list[int], tokens: list[int]):
    """Rows of DRAFT_LENGTH draft tokens, one for every pending token, and the smallest margin among those kept.

    Errors grow along a chain, so float64 shows how large they have become: a choice must be clear by ten times as much.
    """
    rows, smallest = [], float("inf")
    for single, double in zip(
        *(chains(*models, prompt, tokens) for models in pair_in_both_types(target, drafter)), strict=True
    ):
        row = []
        for (token, margin), (same, exact) in zip(single, double, strict=True):
            if token != same or margin < max(DRAFT_MARGIN, 10 * abs(margin - exact)):
                break
            smallest = min(smallest, margin)
            row.append(token)
        rows.append(row + [None] * (DRAFT_LENGTH - len(row)))
    return rows, round(smallest, 5)


@cache
def pair_in_both_types(target, drafter):
    exact = copy.deepcopy(target).double(), copy.deepcopy(drafter).double()
    exact[0].set_experts_implementation("eager")  # the others know no float64
    return (target, drafter), exact


def chains(target, drafter, prompt: list[int], tokens: list[int]):
    """For every pending token a list of DRAFT_LENGTH pairs (draft token, margin); no margin after an unclear choice."""
    embed = target.get_input_embeddings()  # scales by sqrt(D)
    window = target.config.get_text_config().sliding_window
    _, hidden, shared = forward(target, prompt + tokens)
    for i, token in enumerate(tokens):
        length = len(prompt) + i  # committed tokens = position of the pending one
        kept = {"full_attention": slice(0, length), "sliding_attention": slice(max(0, length - (window - 1)), length)}
        committed = {kind: tuple(x[:, :, part] for x in shared[kind]) for kind, part in kept.items()}  # [1, G, S, E]
        state, row, clear = hidden[:, length - 1 : length], [], True
        for _ in range(DRAFT_LENGTH):
            embedding = embed(torch.tensor([[token]]))
            with choice_margins(drafter) as choices:
                output = drafter(
                    inputs_embeds=torch.cat([embedding, state], dim=-1),
                    position_ids=torch.tensor([[length]]),
                    shared_kv_states=committed,
                )
            clear = clear and min(choices, default=1) > CHOICE_MARGIN
            token, state = output.logits.argmax().item(), output.last_hidden_state
            row.append((token, gap(output.logits[0], 1) if clear else 0.0))
        yield row


@contextmanager
def choice_margins(model):
    """Collects how clear each choice inside the model was: experts of the target, clusters of the drafter's head."""
    text, margins, handles = model.config.get_text_config(), [], []
    for name, module in model.named_modules():
        count = {
            "router.proj": text.top_k_experts if hasattr(text, "top_k_experts") else None,
            "masked_embedding.centroids": getattr(model.config, "centroid_intermediate_top_k", None),
        }.get(".".join(name.split(".")[-2:]))
        if count:
            handles.append(module.register_forward_hook(lambda _, __, out, k=count: margins.append(gap(out, k))))
    yield margins
    for handle in handles:
        handle.remove()


def gap(scores: torch.Tensor, k: int) -> float:
    """Smallest difference, over all rows, between the k-th and the (k+1)-th largest score."""
    top = scores.topk(k + 1).values
    return (top[..., k - 1] - top[..., k]).min().item()


# --- the files


def report(name: str, cases: list[dict]) -> None:
    drafts = [token for case in cases for row in case.get("drafts", []) for token in row]
    print(
        f"{name}: {len(cases)} cases, smallest margin {min(case['margin'] for case in cases)}, distinct tokens "
        f"{min(len(set(case['tokens'])) for case in cases)} or more; {len(drafts)} draft tokens, "
        f"{drafts.count(None)} unclear, {len(set(drafts))} distinct, smallest margin "
        f"{min((case['draft_margin'] for case in cases if 'drafts' in case), default=None)}",
        flush=True,
    )


def write(path: Path, golden: dict) -> None:
    """JSON, one case a line."""
    head = json.dumps({key: value for key, value in golden.items() if key != "cases"}, separators=(",", ":"))
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in golden["cases"])
    path.write_text(f'{head[:-1]},"cases":[\n{cases}\n]}}\n')


if __name__ == "__main__":
    main()
