"""Read the paragraphs of an HTML page, without its code and its navigation."""

from html.parser import HTMLParser

_BLOCK_TAGS = {"p", "h1", "h2", "h3", "h4", "dt", "dd", "li", "td"}
_IGNORED_TAGS = {"pre", "script", "style", "table", "title"}


def read_paragraphs(page: bytes) -> list[str]:
    """Return the texts of a UTF-8 page's headings, paragraphs and list items, with single spaces."""
    parser = _ParagraphParser()
    parser.feed(page.decode("utf-8"))
    parser.close()
    paragraphs = []
    for pieces in parser.blocks:
        words = "".join(pieces).split()
        if words:
            paragraphs.append(" ".join(words))
    return paragraphs


class _ParagraphParser(HTMLParser):
    """Collects the text of a page in blocks; the tag of a heading, paragraph or list item begins a new block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[list[str]] = [[]]
        self._ignored_depth = 0  # open tags whose text is ignored

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _IGNORED_TAGS:
            self._ignored_depth += 1
        if tag in _BLOCK_TAGS:
            self.blocks.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag in _IGNORED_TAGS:
            self._ignored_depth -= 1
        if tag in _BLOCK_TAGS:
            self.blocks.append([])

    def handle_data(self, data: str) -> None:
        if not self._ignored_depth:
            self.blocks[-1].append(data)
