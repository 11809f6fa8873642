"""Text without passwords, keys and tokens, for everything that is printed, logged or written to a file."""

import os
import re

_HIDDEN = "***"
_URL = re.compile(
    r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)"
    r"(?:[^/\s'\"]*@)?"  # user and password
    r"(?P<place>[^\s?'\"]*)"
    r"(?P<query>\?[^\s'\"]*=[^\s'\"]*?(?=[.,:;)]*(?:[\s'\"]|$)))?"  # may hold a signature
)
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIALS?)(_|$|ID$)", re.IGNORECASE
)
_SHORTEST_SECRET = 8  # shorter values may be ordinary words


def redact(text: str) -> str:
    """Remove user, password and query from the URLs in ``text``, and the values of environment variables whose names
    mark them as secret.
    """
    text = _URL.sub(lambda url: url["scheme"] + url["place"] + (f"?{_HIDDEN}" if url["query"] else ""), text)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name) and not os.path.exists(value):
            text = text.replace(value, _HIDDEN)
    return text
