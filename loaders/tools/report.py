"""A page of findings: texts, tables and pictures in one HTML file, to attach to a paper."""

from __future__ import annotations

import base64
import io
import os
from html import escape
from pathlib import Path
from typing import Any

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}caption{font-weight:bold;text-align:left}"
    "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}img{max-width:100%}"
    "pre{overflow-x:auto;background:#f6f6f6;padding:.6em}"
)


def write_report(path: str | os.PathLike[str], title: str, /, *parts: Any) -> Path:
    """Write a page with a title and these parts, in order, and return its path.

    All is in the one file, which needs no network and runs no script. All text is escaped.

    Args:
        path: the file to write.
        title: the heading of the page.
        *parts: a str becomes a paragraph, or keeps its lines if it has several; a figure of
            matplotlib is drawn into the page; or what shows itself in a notebook as HTML: a
            `Comparison`, an `Index`, a sampler.

    Raises:
        TypeError: another part.
        OSError: the page cannot be written.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> page = write_report(f"{mkdtemp()}/report.html", "Two ways", "Each record once.",
    ...                     ExactOnceBatchSampler(5, batch_size=4))
    >>> "<h1>Two ways</h1><p>Each record once.</p><table>" in page.read_text()
    True
    """
    body = "".join(_html(part) for part in parts)
    where = Path(path)
    where.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1>{body}</html>\n",
        encoding="utf-8",
    )
    return where


def _html(part: Any) -> str:
    """Write one part."""
    if isinstance(part, str):
        tag = "pre" if "\n" in part else "p"
        return f"<{tag}>{escape(part)}</{tag}>"
    if hasattr(part, "savefig"):
        file = io.BytesIO()
        part.savefig(file, format="png", dpi=120)
        data = base64.b64encode(file.getvalue()).decode()
        return f'<p><img src="data:image/png;base64,{data}" alt="figure"></p>'
    if hasattr(part, "_repr_html_"):
        return str(part._repr_html_())
    raise TypeError(
        f"a part must be a str, a figure, or what has _repr_html_, got a {type(part).__name__}: "
        "give str(…) of it"
    )
