"""EBNF as grammars of xgrammar and llama.cpp have it, turned into llguidance's Lark."""

from __future__ import annotations

import re

from .errors import InvalidArgumentError

_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")


def ebnf_to_lark(text: str) -> str:
    """Return a grammar in Lark; `text` in Lark (with a rule `start`) comes back as it is.

    raises InvalidArgumentError naming the place for what is neither
    """
    if _LARK.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library raises plain Exception
        raise InvalidArgumentError(
            f"ebnf cannot be read: {error}; rules are `name ::= ...`, the first is root"
        ) from error
