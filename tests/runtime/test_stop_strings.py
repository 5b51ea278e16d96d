"""Stop strings over any cutting of the text into pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.stop_strings import StopStrings

WORDS = st.text(alphabet="ab\n", min_size=1, max_size=5)


def reference(text: str, strings: list[str]) -> tuple[str, str | None]:
    """Return (text before the stop string that is complete first, that string), by trying every end."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], strings: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(strings)
    out = "".join(matcher.push(piece) for piece in pieces)
    return out + matcher.flush(), matcher.matched


@settings(max_examples=500)
@given(st.lists(st.text(alphabet="ab\n", max_size=6), max_size=12), st.lists(WORDS, max_size=4))
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], strings: list[str]) -> None:
    assert run(pieces, strings) == reference("".join(pieces), strings)


@given(st.lists(st.text(alphabet="ab\n", max_size=6), max_size=12), st.lists(WORDS, min_size=1, max_size=4))
def test_only_a_possible_beginning_is_held_back(pieces: list[str], strings: list[str]) -> None:
    matcher = StopStrings(strings)
    text, out = "", ""
    for piece in pieces:
        text += piece
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
        held = text[len(out) :]
        assert text.startswith(out)
        assert held == "" or any(s.startswith(held) and s != held for s in strings)


def test_the_string_complete_first_wins() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(["ab", "cd"], ["abcd", "bc"]) == ("a", "bc")


def test_of_two_complete_at_once_the_longer_wins() -> None:
    assert run(["xabc"], ["bc", "abc"]) == ("x", "abc")


def test_nothing_comes_after_the_stop() -> None:
    matcher = StopStrings(["\n"])
    assert matcher.push("one\ntwo") == "one"
    assert matcher.push("three") == ""
    assert matcher.flush() == ""


def test_a_prefix_that_does_not_complete_comes_out_at_the_end() -> None:
    assert run(["see </", "s"], ["</s>"]) == ("see </s", None)
