"""Sphinx extension: writes the reference, and links every name that a page mentions.

An inline literal that is a public name (`Trainer.fit`), a component (`fsdp`), a command
(`stratagem plan`), or an environment variable becomes a link to its description. Authors write
plain Markdown.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from names import internal_paths, public_names, short_names
from reference import write_pages
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

NAMES = public_names()
PATHS = internal_paths(NAMES)
SHORT = short_names(NAMES)
ROOT_PAGES = "ARCHITECTURE|BENCHMARKS|SECURITY|CONTRIBUTING|CHANGELOG"
_CALL = re.compile(r"([A-Za-z_][\w.]*)\(.*\)", re.DOTALL)
_COMMAND = re.compile(r"stratagem(?: [a-z-]+)+")

written: dict[str, tuple[str, str]] = {}
"""The page and the label of components, commands and variables, by what people write."""


def generate(app: Sphinx) -> None:
    """Write the generated pages, before Sphinx looks for pages."""
    written.update(write_pages(NAMES))


def link_root_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to the Markdown files of the root lead to their pages on the site."""
    up = "../" * docname.count("/")
    source[0] = re.sub(
        rf"\]\((?:\.\./)+({ROOT_PAGES})\.md",
        lambda match: f"]({up}generated/{match[1].lower()}.md",
        source[0],
    )


def target_of(text: str) -> str:
    """Return the path of the public name that a literal mentions, or ""."""
    call = _CALL.fullmatch(text)
    for form in (text, f"{call[1]}()" if call else "", call[1] if call else ""):
        if form in SHORT:
            return SHORT[form]
    return ""


class LinkNames(SphinxPostTransform):  # type: ignore[misc]  # checked without Sphinx
    """Links inline literals."""

    default_priority = 50

    def run(self, **kwargs: Any) -> None:
        """Replace each literal that mentions a name by a link."""
        objects = self.env.domains.python_domain.objects
        here = self.env.current_document.docname
        # Several links of a paragraph to one place are one link and the text.
        for literal in list(self.document.findall(nodes.literal)):
            parent = literal.parent
            if _inside(literal, (nodes.reference, nodes.title, nodes.term)):
                continue
            text = literal.astext()
            path = target_of(text)
            if path in objects:
                place = objects[path]
                if place.docname == here and _within(parent, place.node_id):
                    continue
                target = (place.docname, place.node_id)
            else:
                command = _COMMAND.match(text)
                found = written.get(text) or (command and longest(command[0]))
                argument = objects.get(f"stratagem.trainer.Trainer.{text.partition('=')[0]}")
                if not found and (argument is None or argument.docname == here or "=" not in text):
                    continue
                target = found or (argument.docname, argument.node_id)
            parent.replace(
                literal,
                make_refnode(self.app.builder, here, target[0], target[1], literal.deepcopy()),
            )


def longest(command: str) -> tuple[str, str] | None:
    """Return the place of the command that a line of a terminal begins with."""
    words = command.split()
    for count in (3, 2):
        if found := written.get(" ".join(words[:count])):
            return found
    return None


def _inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def _within(node: nodes.Node | None, identifier: str) -> bool:
    """Whether a node is part of the description of a name: it needs no link to itself."""
    while node is not None:
        for child in getattr(node, "children", ()):
            if identifier in getattr(child, "get", lambda *_: ())("ids", ()):
                return True
        node = node.parent
    return False


# ---------------------------------------------------------------- docstrings


_LITERAL = re.compile(r"(?<![`:\w\\])`([^`\n]+)`(?![`_])")


def as_rst(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Turn our docstrings into reST: their literals stand in single backticks, without escapes."""
    in_block = False
    two_digits = any(re.match(r" {3}10\. ", line) for line in lines)
    done: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith(" " * 4):
            in_block = False
        if done and re.fullmatch(r" {4}[\w, *]+,", done[-1]) and line.startswith(" " * 8):
            done[-1] += f" {line.strip()}"  # the names of arguments, over two lines
            continue
        if not in_block and not line.lstrip().startswith(">>>"):
            parts = re.split(r"(``.+?``|(?<![:\w\\])`[^`]+`(?![`_]))", line)
            parts[::2] = [re.sub(r"(?<!\\)\*(?=[\w*\\])", r"\*", text) for text in parts[::2]]
            line = _LITERAL.sub(r"``\1``", "".join(parts))
            if two_digits:
                # Numbers begin in one column, as do their texts.
                line = re.sub(r"^ {4}(\d)\. (?=\S)", r"   \1.  ", line)
        if line.rstrip().endswith("::"):
            in_block = True
        done.append(line)
    lines[:] = done


def resolve(
    app: Sphinx, env: BuildEnvironment, node: nodes.Element, content: nodes.TextElement
) -> nodes.Node | None:
    """Resolve a name in a signature: to the page of ours, or to plain text for those of others."""
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    path = PATHS.get(target) or SHORT.get(target) or SHORT.get(f"{target}()")
    place = env.domains.python_domain.objects.get(path) if path else None
    if place is not None:
        docname = env.current_document.docname
        return make_refnode(app.builder, docname, place.docname, place.node_id, content)
    if node.get("reftype") == "obj":
        return None
    # A type of torch or of the standard library, or a private alias.
    return content


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", generate)
    app.connect("source-read", link_root_pages)
    app.connect("autodoc-process-docstring", as_rst, priority=400)
    app.connect("missing-reference", resolve)
    app.add_post_transform(LinkNames)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
