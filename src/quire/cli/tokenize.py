"""Show the tokens of a text, or the text of tokens, without loading the weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from quire.cli.options import add_model_argument, named_model
from quire.types import RequestError
from quire.util.printable import printable, printable_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", "-p", help="text to tokenize; - reads standard input")
    source.add_argument("--prompt-token-ids", metavar="IDS", help="token ids to make text of, like 1,2,3")
    parser.add_argument(
        "--chat", action="store_true", help="put the text into the chat template, as a user message"
    )
    parser.add_argument(
        "--no-add-special-tokens",
        action="store_true",
        help="without the tokens that the model puts around texts",
    )
    parser.add_argument("--count", action="store_true", help="print only the number of tokens")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with the names of POST /tokenize"
    )
    parser.add_argument("--quiet", action="store_true", help="only what is asked for")


def run(args: argparse.Namespace) -> int:
    from quire.engine.build.opening import open_model

    if args.chat and args.no_add_special_tokens:
        raise RequestError(
            "chat", "its template writes all special tokens; --no-add-special-tokens is for texts"
        )
    model = open_model(named_model(args.model, quiet=args.quiet))
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise RequestError("model", f"{model.folder} has no tokenizer")
    if args.prompt_token_ids is not None:
        ids = read_ids(args.prompt_token_ids, tokenizer.highest_id + 1)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        print(
            len(ids) if args.count else json.dumps({"prompt": text}) if args.json else printable_lines(text)
        )
        return 0
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.chat:
        from quire.text.chat_renderer import ChatAsk, ChatRenderer

        ids = ChatRenderer(tokenizer).encode(ChatAsk(messages=[{"role": "user", "content": text}]))
    else:
        ids = tokenizer.encode(text, add_special_tokens=not args.no_add_special_tokens)
    pieces = [tokenizer.token_bytes(token).decode("utf-8", "backslashreplace") for token in ids]
    _print_tokens(args, ids, pieces)
    return 0


def _print_tokens(args: argparse.Namespace, ids: Sequence[int], pieces: Sequence[str]) -> None:
    """The tokens as asked for: their number, one object, or a line each with the id and what it adds to the text."""
    if args.count:
        print(len(ids))
    elif args.json:
        print(json.dumps({"count": len(ids), "tokens": ids, "token_strs": pieces}))
    else:
        for token, piece in zip(ids, pieces, strict=True):
            print(f"{token}\t{printable(json.dumps(piece, ensure_ascii=False))}")


def read_ids(text: str, vocab: int) -> list[int]:
    """Token ids separated by commas. Raises RequestError for others, and for one that is not below `vocab`."""
    try:
        ids = [int(token) for token in text.split(",")]
    except ValueError:
        raise RequestError("prompt-token-ids", "must be integers separated by commas") from None
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestError("prompt-token-ids", f"{token} is not a token id below {vocab}")
    return ids
