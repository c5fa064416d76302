"""Chat templates: from messages to text, in a sandbox.

Owns the jinja2 environment (the one chat templates are written for), the choice between a checkpoint's named
templates, and the template used when a checkpoint has none. Refuses to own token ids: see `tokenizer`.

A template is code from a checkpoint, so it runs sandboxed and sees plain data only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rljax.records import Message

FALLBACK = """\
{%- if tools %}{{ raise_exception('this checkpoint has no chat template, so it cannot be shown tools') }}{% endif -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content or [] -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""
"""Template of checkpoints that have none: the contents one after the other, behind the BOS token if there is one."""


class _GenerationBlock(Extension):
    """Accept `{% generation %} ... {% endgeneration %}`, with which some templates mark the assistant's words."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into its body; names set inside stay inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models were trained on it: jinja2's own filter would escape HTML characters."""
    pair = None if separators is None else (separators[0], separators[1])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def plain(value: Any) -> Any:
    """Copy messages or tools into dicts, lists and scalars, which is all that a template may see.

    Raises:
        ValueError: For a value that JSON has no word for.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    raise ValueError(
        f"chat messages and tools hold text, numbers, lists and objects only; got {type(value).__name__}: {value!r}"
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copy messages into plain data and leave out null fields: in a message null means absent."""
    if not messages:
        raise ValueError("a conversation needs at least one message")
    return [{key: item for key, item in plain(message).items() if item is not None} for message in messages]


class ChatTemplate:
    """One template of a checkpoint.

    Example:
        ChatTemplate("default", source, origin="model/chat_template.jinja", variables={"bos_token": "<s>"}, now=datetime.now())
    """

    def __init__(self, name: str, source: str, *, origin: str, variables: Mapping[str, str], now: datetime) -> None:
        """Compile the template.

        Args:
            name: Its name in the checkpoint; `default` when it has one template only.
            source: The jinja2 text.
            origin: The file it comes from, for messages.
            variables: Named special tokens (`bos_token` ...) the template may write.
            now: What `strftime_now` shows. Fixed, so that all prompts of a run carry the same date.

        Raises:
            ValueError: When the source is not a valid template.
        """
        self.name = name
        self.source = source
        self.origin = origin
        self._variables = dict(variables)
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda pattern: now.strftime(pattern)
        try:
            self._compiled: Template = self._environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{origin}: the chat template {name!r} is not valid jinja2: {error}") from error

    @cached_property
    def literals(self) -> str:
        """The text the template itself may write, pieces separated by NUL."""
        tree = self._environment.parse(self.source)
        pieces = {node.data for node in tree.find_all(nodes.TemplateData)}
        pieces |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return "\0".join(sorted(pieces))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """Write the conversation as text.

        Args:
            messages: As `plain_messages` returns them.
            tools: Tool schemas; the template sees none at all when there are none.
            add_generation_prompt: Whether to open the assistant's turn at the end.

        Raises:
            ValueError: When the template refuses the conversation or fails; names the template and the message.
        """
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception as error:  # template code can raise anything
            index = self._first_failing(messages, tools, error)
            message = messages[index]
            raise ValueError(
                f"{self.origin}: the chat template {self.name!r} failed at message {index} "
                f"(role {message.get('role')!r}) of {len(messages)}: {error or type(error).__name__}"
            ) from error

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        return self._compiled.render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generate,
            **self._variables,
        )

    def _first_failing(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], error: Exception
    ) -> int:
        """Find the message at which the template starts to fail in this way."""
        for index in range(len(messages) - 1):
            try:
                self._render(messages[: index + 1], tools, False)
            except Exception as earlier:  # only compared: the caller raises the original
                if (type(earlier), str(earlier)) == (type(error), str(error)):
                    return index
        return len(messages) - 1


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Find a checkpoint's chat templates.

    `chat_template.jinja` and `chat_templates/<name>.jinja` replace what `tokenizer_config.json` says; null and an absent
    entry both mean that there is none.

    Returns:
        name -> (origin, source). Empty when the checkpoint has no template.

    Raises:
        ValueError: When `chat_template` is neither text nor a list of `{name, template}`.
    """
    files = {path.stem: path for path in sorted((directory / "chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").exists():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: (str(path), path.read_text(encoding="utf-8")) for name, path in files.items()}
    origin, entry = str(directory / "tokenizer_config.json"), config.get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": (origin, entry)}
    if isinstance(entry, Mapping):
        entry = [{"name": name, "template": source} for name, source in entry.items()]
    named: dict[str, tuple[str, str]] = {}
    for item in entry if isinstance(entry, list) else [entry]:
        if not (isinstance(item, Mapping) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)):
            raise ValueError(f"{origin}: chat_template must be text or a list of {{name, template}}; got {item!r}")
        named[item["name"]] = (origin, item["template"])
    return named
