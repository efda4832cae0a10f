"""python -m mlx_gemma_mtp.chat: a conversation in a terminal, or in a pipe with one prompt a line."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from .calibration import cache_directory
from .command import exit_code
from .conversation import ON_FULL, Chat
from .draft_length import as_policy
from .errors import MtpError, OptionError
from .hub import DTYPES, load
from .sampling import Sampling

# What a model must not send to a terminal: everything of C0 and C1 but tab and newline.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = """\
/help            this list
/system [TEXT]   set the system message, or show it
/reset           forget the conversation
/undo            take back the last turn
/retry           answer the last turn again
/save FILE       write the conversation; FILE.safetensors adds what was computed of it
/load FILE       go on with one written before
/stats           what the last answer cost
/think on|off|N  let the model think, N tokens at most
/thoughts on|off show what it thinks
/draft N|auto    draft tokens per round, 0 for plain decoding
/temp T          temperature, 0 for greedy; likewise /topk N, /topp P, /seed N
/quit            leave, as Ctrl-D does
Enter sends, Alt-Enter or Ctrl-J begins a new line, Ctrl-C stops an answer and keeps what was said."""
NUMBERS = {"/temp": ("temperature", float), "/topk": ("top_k", int), "/topp": ("top_p", float), "/seed": ("seed", int)}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_gemma_mtp.chat", description="Talk with a Gemma 4 model. In a pipe: one prompt a line."
    )
    add = parser.add_argument
    add("--model", default="demo", metavar="NAME", help="a size such as E4B, a hub id, or a directory (%(default)s)")
    add("--drafter", default="auto", metavar="PATH", help='directory of its drafter; "none" for plain decoding')
    add("--system", metavar="TEXT", help="a system message")
    add("--max-tokens", type=int, metavar="N", help="tokens of one answer at most (default: all that fit)")
    add("--draft-length", default="auto", metavar="N", help='"auto" (default), "heuristic", a number, or 0')
    add("--temp", type=float, metavar="T", help="temperature; 0 is greedy (default: the checkpoint's)")
    add("--seed", type=int, metavar="N", help="the same answers again")
    add("--think", default="off", metavar="on|off|N", help="let the model think, N tokens at most (%(default)s)")
    add("--hide-thoughts", action="store_true", help="do not show what the model thinks")
    add("--on-full", choices=ON_FULL, default="stop", help="when the context is full: refuse, or forget the oldest turns")
    add("--cache-bytes", type=int, metavar="N", help="memory for what earlier turns computed")
    add("--dtype", choices=DTYPES, help="type of the weights (default: the checkpoint's; float32 on a CPU)")
    return parser.parse_args(arguments)


def thinking(text: str) -> bool | int:
    if text in ("on", "off"):
        return text == "on"
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise OptionError(f'thinking {text!r}: use "on", "off", or the most tokens of thought')


def draft_length(text: str) -> int | str:
    length = int(text) if text.isdigit() else text
    if length not in ("auto", "heuristic") and not isinstance(length, int):
        raise OptionError(f'draft length {text!r}: use a number, "auto" or "heuristic"')
    return length


class Shell:
    """Reads lines, answers them, obeys commands. Knows of the terminal only what `show` does with text."""

    def __init__(self, chat: Chat, is_terminal: bool, thoughts: bool):
        self.chat, self.is_terminal, self.thoughts = chat, is_terminal, thoughts
        self.completion = None
        self.failed = False

    def obey(self, line: str) -> bool:
        """One line: a command or something to say. Returns whether to go on."""
        try:
            if line.startswith("/"):
                return self.command(*line.split(maxsplit=1))
            if line.strip():
                self.answer(line)
        except MtpError as error:
            self.failed = True
            self.note(f"error: {error}")
        return True

    def command(self, name: str, rest: str = "") -> bool:
        chat, rest = self.chat, rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self.note(HELP)
            case "/system":
                chat.system = rest or chat.system
                self.note(f"system: {chat.system or 'none'}")
            case "/reset":
                chat.reset()
                self.note("a new conversation")
            case "/undo":
                text = chat.undo()
                self.note("nothing to take back" if text is None else f"taken back: {text[:60]}")
            case "/retry":
                text = chat.undo()
                if text is None:
                    self.note("nothing to answer again")
                else:
                    self.answer(text)
            case "/save" | "/load":
                if not rest:
                    raise OptionError(f"{name} needs the name of a file")
                (chat.save if name == "/save" else chat.load)(rest)
                self.note(f"{len(chat.messages)} messages {'written to' if name == '/save' else 'read from'} {rest}")
            case "/stats":
                self.note(str(self.completion.stats) if self.completion else "no answer yet")
            case "/think":
                chat.thinking = thinking(rest)
                self.note(f"thinking {rest}")
            case "/thoughts":
                self.thoughts = thinking(rest) is True
                self.note(f"thoughts {'shown' if self.thoughts else 'hidden'}")
            case "/draft":
                length = draft_length(rest)
                as_policy(length, None, chat.pair.auto)  # refuses what means nothing now, not at the next turn
                chat.draft_length = length
                self.note(f"draft length {rest}")
            case "/temp" | "/topk" | "/topp" | "/seed":
                field, kind = NUMBERS[name]
                try:
                    value = kind(rest)
                except ValueError:
                    raise OptionError(f"{name} {rest!r}: give a number") from None
                chat.sampling = replace(chat.sampling, **{field: value})
                self.note(f"{field} {value}")
            case _:
                raise OptionError(f"{name} is no command: /help lists them")
        return True

    def answer(self, text: str) -> None:
        """Says `text` and shows the answer as it comes. Ctrl-C ends the answer and keeps it."""
        turn = self.chat.send(text)
        shown, stopped = None, False
        try:
            for piece in turn:
                if piece.channel == "thought" and not self.thoughts:
                    continue
                if shown not in (None, piece.channel) and piece.text:
                    self.show("\n\n")
                self.show(piece.text, dim=piece.channel == "thought")
                shown = piece.channel if piece.text else shown
                if piece.tool_call:
                    self.show(f"[calls {piece.tool_call.name} {piece.tool_call.arguments}]\n")
        except KeyboardInterrupt:
            stopped = True
        finally:
            turn.close()
        self.show("\n")
        self.completion = turn.completion()
        if self.is_terminal:
            self.note(self.status(stopped))

    def status(self, stopped: bool) -> str:
        stats, args = self.completion.stats, self.chat.pair.target.args
        used = stats.prompt_tokens + stats.generated_tokens
        parts = [
            f"{stats.generated_tokens} tokens",
            f"{stats.generation_tokens_per_second:.1f} tokens/s",
            f"{stats.acceptance_length:.2f} per round",
            f"{stats.prompt_tokens - stats.reused_tokens} of {stats.prompt_tokens} prompt tokens read",
            f"context {used}/{args.max_position_embeddings}",
        ]
        return " · ".join((["stopped"] if stopped else []) + parts)

    def show(self, text: str, dim: bool = False) -> None:
        """Text of the model, to stdout."""
        if self.is_terminal:
            text = CONTROL.sub("\ufffd", text)
            text = f"{DIM}{text}{PLAIN}" if dim and text else text
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line of ours, to stderr."""
        text = CONTROL.sub("\ufffd", text)
        print(f"{DIM}{text}{PLAIN}" if self.is_terminal else text, file=sys.stderr, flush=True)


def terminal_lines(note: Callable[[str], None]) -> Iterator[str]:
    """Lines typed with editing and history, until Ctrl-D."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        note("for editing, history and several lines: pip install prompt_toolkit")
        yield from _plain_lines()
        return
    keys = KeyBindings()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event) -> None:
        event.current_buffer.insert_text("\n")

    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        (cache_directory() / "chat_history").touch(mode=0o600)
        history = FileHistory(str(cache_directory() / "chat_history"))
    except OSError:
        history = InMemoryHistory()
    session = PromptSession("> ", history=history, key_bindings=keys, prompt_continuation="  ", enable_open_in_editor=True)
    yield from _until_end(session.prompt)


def _plain_lines() -> Iterator[str]:
    return _until_end(lambda: input("> "))


def _until_end(read: Callable[[], str]) -> Iterator[str]:
    while True:
        try:
            yield read()
        except KeyboardInterrupt:  # clears the line
            continue
        except EOFError:
            return


def piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace").rstrip("\r\n")


def run(options: argparse.Namespace) -> int:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    policy, think = draft_length(options.draft_length), thinking(options.think)
    drafter = None if options.drafter.lower() == "none" else options.drafter
    pair = load(options.model, drafter, options.dtype)
    if options.cache_bytes is not None:
        pair.prefixes.limit_bytes = options.cache_bytes
    chat = pair.chat(
        options.system,
        max_tokens=options.max_tokens,
        sampling=Sampling(temperature=options.temp, seed=options.seed),
        draft_length=policy,
        thinking=think,
        on_full=options.on_full,
    )
    shell = Shell(chat, is_terminal, not options.hide_thoughts)
    if is_terminal:
        shell.note(f"{pair.name}: /help lists commands, Ctrl-D leaves")
    for line in terminal_lines(shell.note) if is_terminal else piped_lines():
        if not shell.obey(line):
            break
    return 2 if shell.failed and not is_terminal else 0


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 2 for a user's mistake (in a pipe: in any line), 130 after Ctrl-C."""
    return exit_code(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
