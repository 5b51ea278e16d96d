"""EBNF against a recognizer written here: every short text, random grammars, and what is refused."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("llguidance")  # an optional extra

import toy_tokenizers
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.guided import GuidedParams
from plansmith.runtime.guided_compiler import GuideCompiler
from plansmith.runtime.guided_ebnf import ebnf_to_lark
from plansmith.runtime.tokenizer import Tokenizer

Node = tuple[Any, ...]


@pytest.fixture(scope="module")
def accepts() -> Callable[[str], Callable[[str], bool]]:
    """Return grammar -> text -> whether the guide takes the text, character by character, and may end there."""
    tokenizer = Tokenizer(toy_tokenizers.byte_level(), config={"eos_token": "</s>"})
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)

    def of_grammar(grammar: str) -> Callable[[str], bool]:
        start = compiler.matcher(GuidedParams(ebnf=grammar))

        def of_text(text: str) -> bool:
            matcher = start.deep_copy()
            tokens = [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
            return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

        return of_text

    return of_grammar


def random_node(rng: random.Random, depth: int, rules: int) -> Node:
    kind = rng.choice(["text", "text", "chars", "ref", "ref"] + ["seq", "seq", "alt", "repeat"] * (depth > 0))
    if kind == "text":
        return "text", "".join(rng.choices("ab", k=rng.randint(0 if depth == 0 else 1, 3)))
    if kind == "chars":
        return "chars", rng.choice(["a", "b", "ab"])
    if kind == "ref":
        return "ref", rng.randrange(rules)
    if kind == "repeat":
        low, high = rng.choice([(0, None), (1, None), (0, 1), (1, 2), (2, 2), (2, None)])
        return "repeat", random_node(rng, depth - 1, rules), low, high
    return kind, [random_node(rng, depth - 1, rules) for _ in range(rng.randint(1, 3))]


def written(node: Node, rng: random.Random) -> str:
    kind = node[0]
    if kind == "text":
        return f'"{node[1]}"'
    if kind == "chars":
        return {"a": "[a]", "b": "[b]", "ab": rng.choice(["[ab]", "[a-b]", "[^c-zA-Z0-9 ]"])}[node[1]]
    if kind == "ref":
        return "root" if node[1] == 0 else f"rule-{node[1]}"
    if kind == "repeat":
        marks = {
            (0, None): "*",
            (1, None): "+",
            (0, 1): "?",
            (2, 2): "{2}",
            (2, None): "{2,}",
            (1, 2): "{1, 2}",
        }
        return f"( {written(node[1], rng)} ){marks[node[2], node[3]]}"
    between = " " if kind == "seq" else rng.choice([" | ", "\n  | "])
    inside = between.join(written(part, rng) for part in node[1])
    return f"({inside})" if kind == "alt" or rng.random() < 0.3 else inside


def ends(
    node: Node, text: str, begin: int, rules: list[Node], known: dict[tuple[int, int], set[int]]
) -> set[int]:
    """Return where a match of `node` that begins at `begin` can end, given what is `known` of the rules."""
    kind = node[0]
    if kind == "text":
        return {begin + len(node[1])} if text.startswith(node[1], begin) else set()
    if kind == "chars":
        return {begin + 1} if text[begin : begin + 1] and text[begin] in node[1] else set()
    if kind == "ref":
        return known.setdefault((node[1], begin), set())
    if kind == "alt":
        return set().union(*(ends(part, text, begin, rules, known) for part in node[1]))
    parts = node[1] if kind == "seq" else [node[1]] * node[2]
    found = {begin}
    for part in parts:
        found = set().union(*(ends(part, text, i, rules, known) for i in found))
    if kind == "seq":
        return found
    more, times = set(found), node[2]
    while more and (node[3] is None or times < node[3]):
        more = set().union(*(ends(node[1], text, i, rules, known) for i in more)) - found
        found |= more
        times += 1
    return found


def matches(rules: list[Node], text: str) -> bool:
    """Grow what is known of each rule at each place until nothing changes."""
    known: dict[tuple[int, int], set[int]] = {(0, 0): set()}
    while True:
        before = {key: set(value) for key, value in known.items()}
        for rule, begin in list(known):
            known[rule, begin] |= ends(rules[rule], text, begin, rules, known)
        if known == before:
            return len(text) in known[0, 0]


def test_random_grammars_have_the_texts_that_they_say(
    accepts: Callable[[str], Callable[[str], bool]],
) -> None:
    rng = random.Random(5)
    texts = ["".join(t) for n in range(6) for t in itertools.product("ab", repeat=n)]
    num_recursive = num_taken = num_grammars = 0
    while num_grammars < 250:
        rules = [random_node(rng, 2, 3) for _ in range(3)]
        lines = [
            f"{'root' if i == 0 else f'rule-{i}'} ::= {written(rule, rng)}" for i, rule in enumerate(rules)
        ]
        grammar = "\n".join(lines) + "  # a comment\n"
        wanted = {text for text in texts if matches(rules, text)}
        if not wanted:
            continue  # a grammar without any (short) text
        num_grammars += 1
        num_recursive += not ebnf_to_lark(grammar).startswith("start: /(?:")
        taken = accepts(grammar)
        assert {text for text in texts if taken(text)} == wanted, grammar
        num_taken += len(wanted)
    assert num_recursive > 20 and num_grammars - num_recursive > 20 and num_taken > 500


def test_escapes_and_classes(accepts: Callable[[str], Callable[[str], bool]]) -> None:
    taken = accepts(r'root ::= "\"\\\n\t\x41\u00e9\U0001F600" [\]\-\[^/] [^\x00-\x1f"\\] .')
    assert taken('"\\\n\tAé😀^x\n') and taken('"\\\n\tAé😀/é"') and taken('"\\\n\tAé😀]--')
    assert not taken('"\\\n\tAé😀x--') and not taken('"\\\n\tAé😀-"-') and not taken('"\\\n\tAé😀-\n-')
    assert accepts("root ::= [a-cx-]+")("abcx-") and not accepts("root ::= [a-cx-]+")("d")


def test_json_as_a_grammar(accepts: Callable[[str], Callable[[str], bool]]) -> None:
    taken = accepts(
        r"""
        root   ::= value
        value  ::= object | array | string | number | "true" | "false" | "null"
        object ::= "{" ws ( member ( "," ws member )* )? "}" ws
        member ::= string ":" ws value
        array  ::= "[" ws ( value ("," ws value)* )? "]" ws
        string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
        number ::= "-"? ([0-9] | [1-9] [0-9]+) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
        ws     ::= [ \t\n]{0,20}
        """
    )
    assert taken('{"a": [1, -2.5e3, "x\\u00e9\\n"], "b": {}}') and taken("true") and taken("[]")
    assert not taken("{a: 1}") and not taken('{"a": 1') and not taken("[1,]") and not taken("01")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("root ::= foo", "root names foo"),
        ('main ::= "a"', "no rule root"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= ("a"', "does not end"),
        ('root ::= "a")', r"'\)'"),
        ("root ::= *", "nothing before it"),
        ('root ::= "a"{3,2}', "repeats 2"),
        ('root ::= "a', "line 1: '\"a' is not understood"),
        ("root ::= []", "no character"),
        ("root ::= [z-a]", "wrong way"),
        (r'root ::= "\xZZ"', "escape"),
        (r'root ::= "\UFFFFFFFF"', "escape"),
        ('root ::= "a"\n\nb ::= (= "c")', "line 3"),
        ('root ::= TagDispatch(("a", b))', "line 1"),
        ('"a"', "rule should begin"),
        ("", "no rule root"),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "deep"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_place(grammar: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        ebnf_to_lark(grammar)


def test_lark_stays_as_it_is_unless_its_terminals_double() -> None:
    lark = 'start: A b\nA: B "x"\nB: /[a-z: ]+/ // T: C\nb: "A: B B"\n'
    assert ebnf_to_lark(lark) == lark
    doubling = "start: T0\n" + "".join(f"T{i}: T{i + 1}\n  | T{i + 1}\n" for i in range(40)) + 'T40: "a"\n'
    with pytest.raises(InvalidArgumentError, match="T"):
        ebnf_to_lark(doubling)
    assert re.match("start: ", ebnf_to_lark('root ::= "a"'))
