"""HTML and SVG as values: text is escaped unless it already is markup, so an escape cannot be forgotten."""

from html import escape

VOID = frozenset({"meta", "link", "br", "hr"})
Child = str | None
Attribute = str | float | None


class Safe(str):
    """Markup made here: its text has been escaped."""


def el(tag: str, *children: Child, **attributes: Attribute) -> Safe:
    """One element. `cls` is `class`, other underscores are hyphens (view_box stays viewBox); None is left out."""
    text = "".join(f' {_name(key)}="{escape(_value(value))}"' for key, value in attributes.items() if value is not None)
    return Safe(f"<{tag}{text}>" if tag in VOID else f"<{tag}{text}>{join(*children)}</{tag}>")


def join(*children: Child) -> Safe:
    """Children side by side; a plain string is text and is escaped."""
    return Safe("".join(child if isinstance(child, Safe) else escape(child) for child in children if child is not None))


def _name(key: str) -> str:
    fixed = {"cls": "class", "view_box": "viewBox", "http_equiv": "http-equiv"}
    return fixed.get(key) or key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
