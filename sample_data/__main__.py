"""Download sample data and print where it lies: ``python -m sample_data smollm2 chats``."""

import os
import sys

from sample_data import real_data

KINDS = {
    "smollm2": real_data.smollm2,
    "shakespeare": real_data.shakespeare,
    "bible_es": real_data.bible_es,
    "guide": lambda: real_data.guide("ca"),
    "catalan": real_data.catalan,
    "chats": real_data.chats,
    "pairs": real_data.pairs,
}


def main(names: list[str]) -> None:
    """Download each kind that is named, and print its path."""
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        wrong = f"no such sample data: {', '.join(unknown)}" if unknown else "nothing is named"
        print(f"error: {wrong}; give some of {', '.join(KINDS)}", file=sys.stderr)
        sys.exit(2)
    try:
        for name in names:
            print(os.path.relpath(KINDS[name]()), flush=True)
    except real_data.FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
