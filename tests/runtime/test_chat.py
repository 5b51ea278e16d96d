"""Chat templates render as transformers renders them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import toy_tokenizers
from plansmith.runtime.chat import ChatTemplate
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {% else %}
{{ ' ' + message['content'] + eos_token }}
    {% endif %}
{% endfor %}"""
TOOLS = """{%- set ns = namespace(count=0) %}
{%- if tools %}
{{- 'Tools:\\n' }}
{%- for tool in tools %}
{{- tool | tojson }}{{ '\\n' }}
{{- tool | tojson(indent=2) }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'skip' %}{% continue %}{% endif %}
{%- if message.role == 'end' %}{% break %}{% endif %}
{%- set ns.count = ns.count + 1 %}
{{- ns.count ~ ':' ~ message.role ~ ':' }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}
{{ message.content }}
{% endif %}
{%- endfor %}
{%- if documents is defined and documents %}{{ documents[0].title }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{{- strftime_now('%Y') }}"""
USER = {"role": "user", "content": "  Grüß <b>dich</b> 👋 "}
TURNS = [USER, {"role": "assistant", "content": "Hi & hello"}, {"role": "user", "content": "go on"}]
WEATHER = {
    "type": "function",
    "function": {"name": "wetter", "parameters": {"ort": "Köln", "n": [1, 2.5, None]}},
}


def transformers_render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=toy_tokenizers.byte_level(),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))


@pytest.mark.parametrize("template", [CHATML, BRACKETS, TOOLS], ids=["chatml", "brackets", "tools"])
@pytest.mark.parametrize(
    "variables",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [WEATHER], "enable_thinking": False},
        {"add_generation_prompt": False, "documents": [{"title": "T", "text": "t"}]},
    ],
)
@pytest.mark.parametrize("messages", [[USER], TURNS], ids=["one", "three"])
def test_renders_as_transformers_does(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(messages, **variables) == transformers_render(template, messages, **variables)


def test_loop_controls_work() -> None:
    messages = [{"role": "skip", "content": "a"}, USER, {"role": "end", "content": ""}, USER]
    ours = ChatTemplate(TOOLS).render(messages)
    assert ours == transformers_render(TOOLS, messages, add_generation_prompt=True)
    assert ours.count("Grüß") == 1


def test_strftime_now_is_now() -> None:
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert abs(datetime.date.fromisoformat(text) - datetime.date.today()) <= datetime.timedelta(days=1)


def test_what_the_template_refuses_is_an_error_with_its_words() -> None:
    template = ChatTemplate(BRACKETS, {"bos_token": "<s>", "eos_token": "</s>"})
    with pytest.raises(InvalidArgumentError, match="must alternate"):
        template.render([TURNS[1]])


def test_a_message_without_content_is_an_error_not_a_crash() -> None:
    with pytest.raises(InvalidArgumentError, match="refused"):
        ChatTemplate(CHATML).render([{"role": "user"}])


@pytest.mark.parametrize(
    "messages", [[], 5, "hi", {"role": "user"}, None, ["hello"], [{"content": "no role"}], [{"role": 3}]]
)
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="message"):
        ChatTemplate(CHATML).render(messages)


def test_a_template_with_a_syntax_error_is_the_engines_fault() -> None:
    with pytest.raises(EngineFileError, match=r"chat_template\.jinja"):
        ChatTemplate("{% for m in messages %}{{ m }")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    messages = [USER]
    try:
        text = ChatTemplate(source).render(messages)
    except InvalidArgumentError:
        text = ""
    assert "class" not in text and "module" not in text
    assert messages == [USER]
