"""EBNF, as grammars for xgrammar and llama.cpp have it, turned into llguidance's Lark.

llguidance cuts text into the longest words that terminals match, as a compiler does. EBNF knows no words: behind "a",
`"a" b | "ab" c` may mean either. A grammar without recursion becomes one regular expression, which is exact and fast.
In any other one every terminal is a single character: exact, too, and a millisecond a mask for 50,000 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from .errors import InvalidArgumentError

# Groups within groups; each costs some frames of the stack.
_MAX_DEPTH = 60
# Parts of the regular expression that a grammar without recursion is written out as; larger ones stay rules.
_MAX_EXPANDED = 5_000
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")
_LARK_RULE = re.compile(r"(?m)^[ \t]*[?!]?([A-Za-z_][A-Za-z_0-9]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:")
_LARK_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_TOKEN = re.compile(
    rf'(?P<space>(?:\s|\#[^\n]*)+)|(?P<rule>{_NAME})\s*::=|(?P<name>{_NAME})|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<chars>\[(?:\\.|[^\]\\])*\])|(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(?P<mark>[()|*+?.])",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]{1,6})\}|(.))", re.DOTALL
)
_CONTROLS = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "b": "\b",
    "a": "\a",
    "0": "\0",
    "e": "\x1b",
}


@dataclasses.dataclass(frozen=True)
class _Node:
    """kind "chars": one character of `text`, the inside of a regular expression's brackets;
    "ref": the rule `text`; "seq", "alt": of `parts`; "repeat": of parts[0], low to high (None = any number) times.
    """

    kind: str
    text: str = ""
    parts: tuple[_Node, ...] = ()
    low: int = 0
    high: int | None = None

    def refs(self) -> Iterator[str]:
        """Yield the rules it names."""
        if self.kind == "ref":
            yield self.text
        for part in self.parts:
            yield from part.refs()

    def write(self, rules: dict[str, str], *, in_regex: bool) -> str:
        """Return it in Lark, or as a regular expression; rules : what stands for each rule."""
        group = "(?:{})" if in_regex else "({})"
        if self.kind == "chars":
            return f"[{self.text}]" if in_regex else f"/[{self.text}]/"
        if self.kind == "ref":
            return rules[self.text]
        if not self.parts:
            return "(?:)" if in_regex else '""'
        written = [part.write(rules, in_regex=in_regex) for part in self.parts]
        if self.kind == "seq":
            return ("" if in_regex else " ").join(written)
        if self.kind == "alt":
            return group.format(" | ".join(written) if not in_regex else "|".join(written))
        times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((self.low, self.high))
        high = "" if self.high is None else self.high
        return group.format(written[0]) + (times or f"{{{self.low},{high}}}")


def ebnf_to_lark(text: str) -> str:
    """Return a grammar in Lark; `text` in Lark (with a rule `start`) comes back as it is.

    raises InvalidArgumentError naming the place for what is neither, and for terminals that double too often
    """
    if _LARK.search(text):
        _check_terminals(text)
        return text
    rules = _Reader(text).rules()
    order = _written_order(rules)
    if order is None:
        names = {name: "start" if name == "root" else f"r_{i}" for i, name in enumerate(rules)}
        lines = [f"{names[name]}: {node.write(names, in_regex=False)}" for name, node in rules.items()]
        return "\n".join(lines) + "\n"
    written: dict[str, str] = {}
    for name in order:
        written[name] = f"(?:{rules[name].write(written, in_regex=True)})"
    return f"start: /{written['root']}/\n"


def _written_order(rules: dict[str, _Node]) -> list[str] | None:
    """Return the rules that root needs, each behind those it needs; None with recursion, or when they would be huge."""
    order: list[str] = []
    sizes: dict[str, int] = {}
    entered: set[str] = set()
    pending = [("root", False)]
    while pending:
        name, is_done = pending.pop()
        if is_done:
            sizes[name] = _size(rules[name]) + sum(
                sizes.get(ref, _MAX_EXPANDED) for ref in rules[name].refs()
            )
            order.append(name)
            if sizes[name] > _MAX_EXPANDED:
                return None
        elif name not in entered:
            entered.add(name)
            pending.append((name, True))
            pending += [(ref, False) for ref in rules[name].refs() if ref not in sizes]
    return order


def _size(node: _Node) -> int:
    return 1 + sum(_size(part) for part in node.parts)


class _Reader:
    """Reads EBNF, token by token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"{text[position : position + 20]!r} is not understood", position)
            kind = str(match.lastgroup)
            if kind != "space":
                self._tokens.append((kind, match.group(kind), position))
            position = match.end()
        self._tokens.append(("end", "", len(text)))
        self._next = 0

    def rules(self) -> dict[str, _Node]:
        """Return the rules by name; every rule that one names is there, and `root` is."""
        rules: dict[str, _Node] = {}
        places: dict[str, int] = {}
        while self._tokens[self._next][0] != "end":
            kind, name, place = self._take()
            if kind != "rule":
                raise self._error(f"{name!r} stands where a rule should begin: `name ::= ...`", place)
            if name in rules:
                raise self._error(f"the rule {name} is there twice", place)
            rules[name], places[name] = self._alternatives(0), place
        if "root" not in rules:
            raise self._error("there is no rule root, which is where a text begins", 0)
        for name, node in rules.items():
            for ref in node.refs():
                if ref not in rules:
                    raise self._error(f"the rule {name} names {ref}, and there is no such rule", places[name])
        return rules

    def _take(self) -> tuple[str, str, int]:
        self._next += 1
        return self._tokens[self._next - 1]

    def _alternatives(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self._error(f"groups stand more than {_MAX_DEPTH} deep", self._tokens[self._next][2])
        parts = [self._sequence(depth)]
        while self._tokens[self._next][1] == "|" and self._tokens[self._next][0] == "mark":
            self._take()
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _Node("alt", parts=tuple(parts))

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while True:
            kind, text, place = self._tokens[self._next]
            if kind in ("end", "rule") or (kind == "mark" and text in "|)"):
                return parts[0] if len(parts) == 1 else _Node("seq", parts=tuple(parts))
            self._take()
            if kind == "times" or (kind == "mark" and text in "*+?"):
                if not parts:
                    raise self._error(f"{text} has nothing before it to repeat", place)
                parts[-1] = self._repeat(parts[-1], text, place)
            else:
                parts.append(self._item(kind, text, place, depth))

    def _item(self, kind: str, text: str, place: int, depth: int) -> _Node:
        if kind == "name":
            return _Node("ref", text)
        if kind == "text":
            return _Node(
                "seq", parts=tuple(_Node("chars", _quoted(c)) for c, _ in self._characters(text[1:-1], place))
            )
        if kind == "chars":
            return _Node("chars", self._class(text[1:-1], place))
        if text == ".":
            return _Node("chars", r"\x{0}-\x{10FFFF}")
        node = self._alternatives(depth + 1)
        if self._take()[1] != ")":
            raise self._error("the group that begins here does not end", place)
        return node

    def _repeat(self, node: _Node, text: str, place: int) -> _Node:
        if text in "*+?":
            return _Node("repeat", parts=(node,), low=int(text == "+"), high=1 if text == "?" else None)
        numbers = [part.strip() for part in text[1:-1].split(",")]
        low = int(numbers[0])
        high = low if len(numbers) == 1 else int(numbers[1]) if numbers[1] else None
        if high is not None and (high < low or high == 0):
            raise self._error(f"{text} repeats {high} times at most; at least {max(low, 1)} is wanted", place)
        return _Node("repeat", parts=(node,), low=low, high=high)

    def _class(self, text: str, place: int) -> str:
        negated = text.startswith("^")
        characters = list(self._characters(text[negated:], place))
        out, i = "^" if negated else "", 0
        while i < len(characters):
            low = high = characters[i][0]
            if characters[i + 1 : i + 2] == [("-", False)] and i + 2 < len(characters):
                high = characters[i + 2][0]
                i += 2
            if high < low:
                raise self._error(f"the range {low!r}-{high!r} is the wrong way round", place)
            out += _quoted(low) if low == high else f"{_quoted(low)}-{_quoted(high)}"
            i += 1
        if not characters:
            if not negated:
                raise self._error("[] matches no character", place)
            return r"\x{0}-\x{10FFFF}"
        return out

    def _characters(self, text: str, place: int) -> Iterator[tuple[str, bool]]:
        """Yield each character and whether it was escaped."""
        position = 0
        while position < len(text):
            match = _ESCAPE.match(text, position)
            if match is None:
                yield text[position], False
                position += 1
                continue
            code = next((group for group in match.groups()[:4] if group is not None), None)
            own = match.group(5)
            if (code is not None and int(code, 16) > 0x10FFFF) or (own is not None and own in "xuU"):
                raise self._error(
                    f"the escape {match.group()} is not one of \\xHH, \\uHHHH, \\UHHHHHHHH", place
                )
            yield (chr(int(code, 16)) if code is not None else _CONTROLS.get(own, own)), True
            position = match.end()

    def _error(self, what: str, position: int) -> InvalidArgumentError:
        line = self._text.count("\n", 0, position) + 1
        return InvalidArgumentError(
            f"ebnf, line {line}: {what}; rules are `name ::= ...`, text begins with root"
        )


@functools.lru_cache(4096)  # texts come from users
def _quoted(character: str) -> str:
    """Return a character as it can stand anywhere in a regular expression, and in Lark."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"


def _check_terminals(lark: str) -> None:
    """Raise when a terminal's terminals, written out, are huge: llguidance would write them out, limits or not."""
    text = _LARK_TEXT.sub(" ", lark)
    heads = list(_LARK_RULE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bodies = {head.group(1): text[head.end() : end] for head, end in zip(heads, ends, strict=True)}
    terminals = {
        name: re.findall(r"\b_?[A-Z][A-Z_0-9]*\b", body) for name, body in bodies.items() if name.isupper()
    }
    sizes: dict[str, int] = {}
    for _ in range(len(terminals)):
        changed = False
        for name, refs in terminals.items():
            size = 1 + sum(sizes.get(ref, 1) for ref in refs)
            changed |= size != sizes.get(name)
            sizes[name] = size
            if size > _MAX_EXPANDED:
                raise InvalidArgumentError(
                    f"ebnf has the terminal {name}, which is made of over {_MAX_EXPANDED} others, written out; "
                    "make some of them rules (in small letters)"
                )
        if not changed:
            return
