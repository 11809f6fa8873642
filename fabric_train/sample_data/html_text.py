"""Read the paragraphs of an HTML page, without its code and its navigation."""

from html.parser import HTMLParser

_BLOCKS = {"p", "h1", "h2", "h3", "h4", "dt", "dd", "li", "td"}
_LEFT_OUT = {"pre", "script", "style", "table", "title"}


def read_paragraphs(page: bytes) -> list[str]:
    """Return the texts of a UTF-8 page's headings, paragraphs and list items, with single spaces."""
    parser = _Paragraphs()
    parser.feed(page.decode("utf-8"))
    parser.close()
    texts = (" ".join("".join(pieces).split()) for pieces in parser.blocks)
    return [text for text in texts if text]


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[list[str]] = [[]]
        self._left_out = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._left_out += tag in _LEFT_OUT
        if tag in _BLOCKS:
            self.blocks.append([])

    def handle_endtag(self, tag: str) -> None:
        self._left_out -= tag in _LEFT_OUT
        if tag in _BLOCKS:
            self.blocks.append([])

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self.blocks[-1].append(data)
