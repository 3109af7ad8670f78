"""Request bodies: validated and converted for the engine.

No field is silently ignored: a field that kvchat does not support and that would change the answer is refused, unless
its value requests nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from kvchat.config import modes
from kvchat.config.schema import SamplingSettings
from kvchat.errors import UsageError
from kvchat.protocol.messages import MAX_LOGPROBS, Load, Loaded, Sampling, Turn, Variant, parse_args
from kvchat.serve.refusals import invalid, of_body

UNLIMITED = -1  # tokens; LM Studio's clients send it
MINUS_ONE = {"top_k": 0, "seed": None}  # the meaning of -1, as in vLLM and llama.cpp
NO_FUNCTIONS = "this form is outdated; use tools"
NO_CALLS = (
    "This model's chat template has no tools, or transformers cannot parse its calls. Send none: in Open WebUI turn "
    "off Builtin Tools among the model's capabilities."
)
NO_PREDICTION = "not supported; the mode parameter draft=lookup drafts from earlier text"
CHOICES = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'


def only(*accepted: Any, reason: str) -> AfterValidator:
    """Return a validator that rejects values other than None and the ``accepted`` ones, with a ``reason``."""

    def check(value: Any) -> Any:
        if value is not None and value not in accepted:
            raise ValueError(reason)
        return value

    return AfterValidator(check)


def _joined(content: Any) -> Any:
    """Return the text of a message, which may come in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text), **more} if not more.keys() - {"cache_control"}:
                texts.append(text)
            case _:
                raise ValueError('each part must be {"type": "text", "text": "..."}: kvchat reads only text')
    return "\n".join(texts)


def _without_empty(stop: Any) -> Any:
    """Drop empty stop strings, which some clients send for none."""
    listed = [stop] if isinstance(stop, str) else stop
    return [text for text in listed if text != ""] or None if isinstance(listed, list) else listed


def _choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required" | {"type": "function", "function": {"name": str()}}:
            return value
    raise ValueError(CHOICES)


def _only(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], str):
            raise ValueError("one prompt at a time, as a string")
        return value[0]
    return value


@dataclass(frozen=True)
class Defaults:
    """The server's sampling, and its ``system`` prompt for messages without one; a request may override both.

    The length in ``sampling`` applies if ``is_limited``; otherwise it depends on the kind of request.
    """

    sampling: Sampling = Sampling()
    is_limited: bool = False
    system: str = ""


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _nulls_ask_for_nothing(cls, fields: Any) -> Any:
        """Drop unknown fields that are null, because some clients send every field they know."""
        if isinstance(fields, dict) and cls.model_config["extra"] == "forbid":
            return {name: value for name, value in fields.items() if value is not None or name in cls.model_fields}
        return fields


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: Any = None  # OpenAI's client adds this, ``index`` and ``parsed`` to messages that it sends back


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call; arguments that are a JSON object, or empty, become an object."""
        arguments = self.function.arguments or {}
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            arguments = parsed if isinstance(parsed, dict) else {} if parsed is None else arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Function(Body):
    """The description of a tool, which only the model reads: as in llama.cpp and vLLM, ``strict`` enforces nothing.

    The arguments of a call fit ``parameters`` only if ``tool_choice`` forces it.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class Tool(Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined)]
    reasoning_content: str | None = None
    reasoning: str | None = None  # its name in newer vLLM, mlx-lm and others, some of which send both
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, only(reason=NO_FUNCTIONS)] = None
    audio: Annotated[Any, only(reason="kvchat reads only text")] = None
    refusal: Annotated[Any, only("", reason="write it as content")] = None
    annotations: Annotated[Any, only([], reason="kvchat's models do not see them")] = None
    parsed: Any = None
    cache_control: Any = None  # a mark for Anthropic's cache
    provider_specific_fields: Any = None  # LiteLLM adds what another server said besides
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _answers_need_no_content(cls, fields: Any) -> Any:
        """Accept null, which some programs write for an answer that has only calls or a thought."""
        if isinstance(fields, dict) and fields.get("content") is None and fields.get("role") == "assistant":
            return {**fields, "content": ""}
        return fields

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant calls tools")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id and the role tool go together")
        return self

    def turn(self) -> Turn:
        """Return the message for the engine, with what the chat template gets besides its text."""
        more: dict[str, Any] = {
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()],
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }
        more = {name: value for name, value in more.items() if value}
        role = "system" if self.role == "developer" else self.role
        return Turn(role, self.content, more=json.dumps(more) if more else "")


class KvchatFields(Body):
    """kvchat's own fields: the mode that answers the request, by default the server's."""

    mode: str | None = None
    budget: int | None = None
    params: dict[str, Any] = Field(default_factory=dict)

    def variant(self, default: str) -> Variant:
        """Return the mode and its parameters.

        Raises:
            Refusal: the mode or a parameter is unknown, a value is out of range, or the budget is given twice.
        """
        mode = self.mode or default
        if self.budget is not None and "budget" in self.params:
            raise invalid("kvchat.budget and kvchat.params.budget set the same: send one of them.", "kvchat.budget")
        params = self.params | ({} if self.budget is None else {"budget": self.budget})
        try:
            modes.parse(mode, params)
        except UsageError as error:
            raise invalid(str(error), "kvchat") from None
        return Variant(mode, params)


class JsonSchema(Body):
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The constraint on an answer: none, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_openai_writes_it(cls, fields: Any) -> Any:
        """Accept the schema next to the type, as llama.cpp and Together do, also for an object."""
        match fields:
            case {"type": "json_object" | "json_schema", "schema": dict(schema), **more} if not any(more.values()):
                return {"type": "json_schema", "json_schema": {"schema": schema}}
        return fields

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and the type of that name go together")
        return self

    def schema_text(self) -> str:
        """Return the JSON schema for the engine, or ""."""
        objects = {"text": "", "json_object": '{"type": "object"}'}
        return json.dumps(self.json_schema.schema_) if self.json_schema else objects[self.type]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AnswerRequest(Body):
    """Fields shared by requests for chats and texts."""

    DEFAULT_TOKENS: ClassVar[int | None] = None  # length of an answer if the request sets none; None: the context

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_without_empty)] = None
    kvchat: KvchatFields = KvchatFields()
    n: Annotated[Any, only(1, reason="a request gets one answer; send it again for another")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[Any, only({}, reason="kvchat has no logit bias")] = None
    # Bookkeeping, which cannot change the answer.
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @model_validator(mode="before")
    @classmethod
    def _minus_one(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return fields | {name: value for name, value in MINUS_ONE.items() if fields.get(name) == -1}
        return fields

    @property
    def streams_usage(self) -> bool:
        """True if a stream should end with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def turns(self, defaults: Defaults) -> tuple[Turn, ...]:
        """Return the prompt for the engine."""
        raise NotImplementedError

    def json_schema(self) -> str:
        """Return the schema that the answer must match, or ""."""
        return ""

    def must_call(self) -> tuple[str, ...]:
        """Return the names of the tools of which the answer must call one, if it must."""
        return ()

    def num_scored(self) -> int | None:
        """Return how many of the likeliest tokens to send with each token's probability; None for no probabilities."""
        raise NotImplementedError

    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call."""
        return []

    @property
    def calls_once(self) -> bool:
        """True if the answer may have at most one call."""
        return False

    def max_answer(self) -> int | None:
        """Return the request's limit of answer tokens, or None."""
        return self.max_tokens

    def sampling(self, defaults: Defaults, context: int) -> Sampling:
        """Return the server's sampling, overridden by the request's fields.

        Raises:
            Refusal: a value is out of range.
        """
        limit = self.max_answer()
        most = self.DEFAULT_TOKENS or context
        default = defaults.sampling if defaults.is_limited else replace(defaults.sampling, max_new_tokens=most)
        values = vars(default) | self.model_dump(include=set(SamplingSettings.model_fields), exclude_none=True)
        if limit is not None:
            values["max_new_tokens"] = context if limit == UNLIMITED else limit
        try:
            return SamplingSettings.model_validate(values).sampling()
        except ValidationError as error:
            raise of_body(error) from None

    def template_args(self, load: Load, loaded: Loaded) -> tuple[str, ...]:
        """Return variables for the chat template, as ``name=JSON``: the server's, and in a chat the request's."""
        return load.template_args


class ChatRequest(AnswerRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, AfterValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([], reason=NO_FUNCTIONS)] = None
    function_call: Annotated[Any, only("none", "auto", reason=NO_FUNCTIONS)] = None
    modalities: Annotated[Any, only(["text"], reason="kvchat generates only text")] = None
    audio: Annotated[Any, only(reason="kvchat generates only text")] = None
    prediction: Annotated[Any, only(reason=NO_PREDICTION)] = None
    web_search_options: Annotated[Any, only(reason="kvchat does not search the web")] = None
    verbosity: Annotated[Any, only(reason="not supported by kvchat's models")] = None
    store: Annotated[Any, only(False, reason="kvchat does not store answers")] = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.offered_tools() and self.json_schema():
            raise ValueError("an answer constrained to JSON cannot call tools: omit tools or response_format")
        if self.tool_choice not in (None, "none", "auto") and not self.must_call():
            raise ValueError("tool_choice needs a tool that is not in tools")
        return self

    def num_scored(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    @property
    def calls_once(self) -> bool:
        return self.parallel_tool_calls is False

    def must_call(self) -> tuple[str, ...]:
        names = tuple(tool.function.name for tool in self.tools or ())
        match self.tool_choice:
            case "required":
                return names
            case {"function": {"name": name}} if name in names:
                return (name,)
        return ()

    def json_schema(self) -> str:
        return self.response_format.schema_text() if self.response_format else ""

    def turns(self, defaults: Defaults) -> tuple[Turn, ...]:
        return _turns(self.messages, defaults)

    def max_answer(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def template_args(self, load: Load, loaded: Loaded) -> tuple[str, ...]:
        """Return the server's and the request's variables.

        Raises:
            Refusal: the template does not use a variable, or does not support tools.
        """
        used, tools = loaded.template_variables, self.offered_tools()
        own = self._effort(used) | (self.chat_template_kwargs or {})
        if not loaded.calls and (tools or any(message.tool_calls or message.tool_call_id for message in self.messages)):
            raise invalid(NO_CALLS, "tools" if tools else "messages")
        for name in own:
            if name not in used:
                others = f", only {', '.join(used)}" if used else ""
                raise invalid(f"The model's chat template does not use {name}{others}.", name)
        servers = [text for text in load.template_args if text.partition("=")[0] not in own]
        own |= {"tools": tools} if tools else {}
        args = (*servers, *(f"{name}={json.dumps(value)}" for name, value in own.items()))
        try:
            parse_args(args)
        except UsageError as error:
            raise invalid(str(error), "chat_template_kwargs") from None
        return args

    def _effort(self, used: Collection[str]) -> dict[str, Any]:
        """Return the effort as variables that the template uses: most have only enable_thinking, some neither."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        asked = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        known = {name: value for name, value in asked.items() if name in used}
        return known or ({} if effort == "none" else {"reasoning_effort": effort})


class TextRequest(AnswerRequest):
    DEFAULT_TOKENS = 16  # as in OpenAI's API, because a text may never end by itself

    prompt: Annotated[str, BeforeValidator(_only)]
    best_of: Annotated[Any, only(1, reason="only one answer is generated")] = None
    echo: Annotated[Any, only(False, reason="the prompt is not echoed")] = None
    suffix: Annotated[Any, only("", reason="put the model's own fill-in-the-middle tokens in the prompt")] = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def num_scored(self) -> int | None:
        return self.logprobs

    def turns(self, defaults: Defaults) -> tuple[Turn, ...]:
        return (Turn("text", self.prompt),)


class TokenizeRequest(Body):
    """A text or messages to tokenize."""

    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)

    def turns(self, defaults: Defaults) -> tuple[Turn, ...]:
        """Return the prompt for the engine.

        Raises:
            Refusal: both are given, or neither.
        """
        if (self.content is None) == (self.messages is None):
            raise invalid("Send either content (text) or messages.")
        if self.messages is not None:
            return _turns(self.messages, defaults)
        return (Turn("text", self.content or ""),)


def _turns(messages: Sequence[Message], defaults: Defaults) -> tuple[Turn, ...]:
    turns = tuple(message.turn() for message in messages)
    has_own = not defaults.system or any(turn.role == "system" for turn in turns)
    return turns if has_own else (Turn("system", defaults.system), *turns)
