"""Draw a Vega-Lite specification as a PNG, or write Vega's JavaScript: ``python draw.py png|javascript FILE``.

The specification is read from standard input. This runs in a process of its own and imports nothing of the project.
"""

import sys
from pathlib import Path

import vl_convert


def main() -> None:
    """Write what the first argument names into the file that the second one names."""
    what, output = sys.argv[1], Path(sys.argv[2])
    if what == "png":
        output.write_bytes(vl_convert.vegalite_to_png(sys.stdin.read(), scale=2))
    else:
        output.write_text(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed"), encoding="utf-8")


if __name__ == "__main__":
    main()
