"""python -m mlx_gemma_mtp.generate: one prompt in, streamed text out. Text goes to stdout, everything else to stderr."""

import argparse
import json
import sys
from dataclasses import asdict

from tqdm import tqdm

from .command import exit_code
from .errors import OptionError, PromptError
from .hub import DTYPES, load
from .sampling import PENALTY_CONTEXT, Sampling


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_gemma_mtp.generate",
        description="Generate text with a Gemma 4 model and its Multi-Token-Prediction drafter.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="a size such as E4B, a hub id, or a directory of a target or pair")
    add("--drafter", default="auto", metavar="PATH", help='directory of its drafter; "none" for plain decoding')
    add("--prompt", metavar="TEXT", help="the prompt; - or nothing reads it from stdin")
    add("--system", metavar="TEXT", help="a system message before the prompt")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens to generate at most (default %(default)s)")
    add(
        "--draft-length", type=draft_length, default="auto", metavar="N",
        help='draft tokens per round: "auto" (default), "heuristic", a number, or 0 for plain decoding',
    )  # fmt: skip
    checkpoint = "(default: the checkpoint's)"
    add("--temp", type=float, metavar="T", help=f"temperature; 0 is greedy {checkpoint}")
    add("--top-k", type=int, metavar="N", help=f"sample from the N most probable tokens, 0 for all {checkpoint}")
    add("--top-p", type=float, metavar="P", help=f"sample from the smallest set of probability P {checkpoint}")
    add("--min-p", type=float, metavar="P", help="leave out tokens under P times the best one's probability")
    add("--repetition-penalty", type=float, metavar="X", help="divide the logits of tokens seen")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="subtract from the logits of tokens seen")
    add("--frequency-penalty", type=float, default=0.0, metavar="X", help="subtract for every time a token was seen")
    add("--penalty-context", type=int, default=PENALTY_CONTEXT, metavar="N", help="tokens that count as seen (%(default)s)")
    add("--logit-bias", type=token_bias, action="append", default=[], metavar="ID:X", help="add X to the logit of a token id")
    add("--seed", type=int, metavar="N", help="the same text again, whatever the draft length")
    add("--logprobs", type=int, metavar="N", help="with --json: log-probabilities of the tokens and of the N best")
    add("--draft-position", type=int, choices=(0, -1), default=0, help="position of drafts relative to the pending token")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on after stop tokens")
    add("--dtype", choices=DTYPES, help="type of the weights (default: the checkpoint's; float32 on a CPU)")
    add("--adapter-path", metavar="PATH", help="mlx-lm LoRA adapter for the target")
    add("--json", action="store_true", help="print one JSON object with text, tokens and stats instead of the text")
    return parser.parse_args(arguments)


def draft_length(text: str) -> int | str:
    if text in ("auto", "heuristic"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is neither a number nor "auto" nor "heuristic"') from None


def token_bias(text: str) -> tuple[int, float]:
    try:
        token, value = text.split(":")
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID:X, as in 106:-5") from None


def read_prompt(text: str | None) -> str:
    """The prompt: from the option, from a pipe on stdin, or asked for on a terminal."""
    if text not in (None, "-"):
        return text
    if sys.stdin is None:
        raise PromptError("there is no prompt and stdin is closed: give --prompt TEXT")
    if text is None and sys.stdin.isatty():
        print("prompt> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().rstrip("\n")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin is not UTF-8 text (byte {error.start}): convert it to UTF-8") from None


def run(options: argparse.Namespace) -> int:
    prompt = read_prompt(options.prompt)
    if options.logprobs is not None and not options.json:
        raise OptionError("--logprobs are part of the JSON output: add --json")
    if options.system is not None:
        if options.raw:
            raise OptionError("--system needs the chat template, which --raw leaves out: use one of them")
        if not prompt:
            raise PromptError("the prompt is empty: give some text")
        prompt = [{"role": "system", "content": options.system}, {"role": "user", "content": prompt}]
    drafter = None if options.drafter.lower() == "none" or options.draft_length == 0 else options.drafter
    pair = load(options.model, drafter, options.dtype, options.adapter_path, options.draft_position)
    with tqdm(unit="token", desc="prompt", leave=False, disable=not sys.stderr.isatty()) as bar:
        stream = pair.stream(
            prompt,
            max_tokens=options.max_tokens,
            draft_length=options.draft_length,
            sampling=Sampling(
                temperature=options.temp,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                repetition_penalty=options.repetition_penalty,
                presence_penalty=options.presence_penalty,
                frequency_penalty=options.frequency_penalty,
                penalty_context=options.penalty_context,
                logit_bias=dict(options.logit_bias),
                seed=options.seed,
            ),
            logprobs=options.logprobs,
            raw=options.raw,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
            on_prefill=lambda done, total: advance(bar, done, total),
        )
        interrupted = False
        try:
            for piece in stream:
                bar.close()
                if not options.json and piece.channel == "answer":
                    print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
            stream.close()
    completion = stream.completion()
    if options.json:
        fields = {"text": completion.text, "tokens": completion.tokens, "finish_reason": completion.finish_reason}
        if options.logprobs is not None:
            fields["logprobs"] = [asdict(entry) for entry in completion.logprobs]
        print(json.dumps(fields | {"stats": completion.stats.as_dict()}, ensure_ascii=False))
    else:
        print(flush=True)
        print(f"\n{completion.stats}", file=sys.stderr)
    return 130 if interrupted else 0


def advance(bar: tqdm, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    options = parse(arguments)
    return exit_code(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
