"""What a trace says of itself: the first line of its file, checked field by field."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oasiskv.errors import TraceError

MAX_TILES = 2**27
"""Most layers times KV heads times blocks: one mask of a reader is as many bytes."""

MAX_BODY_BYTES = 2**28
"""Most bytes of a body, unpacked."""

MAX_STEPS = 2**20
"""Most steps."""

NUMBER_BYTES = 4
"""Bytes of each number of the body."""

MAX_NUMBER = 2 ** (8 * NUMBER_BYTES) - 1
"""The largest number of the body."""

# Printable: what a file says of itself is shown at terminals.
Words = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Size = Annotated[int, Field(ge=1, le=2**24)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Count = Annotated[int, Field(ge=0, le=2**32)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def of(cls, **fields: Any) -> Self:  # noqa: ANN401 - the fields of each class
        """Like the constructor, for what users ask for.

        Raises:
            TraceError: a field is missing, unknown or out of range, or all together are too large.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise TraceError(f"no trace can be like that: {_describe(error)}") from None


class Recording(_Part):
    """The run that the wanted blocks come from; a replay keeps it as it was.

    Args:
        model: name of the model.
        text: what was decoded: task, question and seed.
        context_tokens: tokens of the text, the decoded ones included.
        digest: what blocks were scored by.
        lookahead: lookahead mode.
        drafts: where drafts came from.
        hysteresis: factor on the score of resident blocks; 1 leaves the plain top K.
        hot_blocks: S of the run, which the queries depend on a little.
        cap_blocks: most blocks fetched per step, layer and KV head in the run.
    """

    model: Words
    text: Words
    context_tokens: Size
    digest: Words
    lookahead: Words
    drafts: Words
    hysteresis: float = Field(ge=1, le=1000, allow_inf_nan=False)
    hot_blocks: Size
    cap_blocks: Size


class Replay(_Part):
    """How another shape was made of a recording.

    Args:
        layers: of the source.
        kv_heads: of the source.
        budget_blocks: of the source.
        steps: of the source.
        seed: dealt the source's KV heads.
        copies: blocks that each block of the source became.
    """

    layers: Size
    kv_heads: Size
    budget_blocks: Size
    steps: Steps
    seed: int = Field(ge=0, lt=2**63)
    copies: Size


class Header(_Part):
    """Shape of a trace, and where it comes from.

    Args:
        format: the kind of file.
        version: of the format.
        written_by: program and version.
        layers: layers with wanted blocks.
        kv_heads: KV heads of each.
        block_tokens: tokens of one block.
        budget_blocks: K: most blocks wanted per step, layer and KV head.
        sink_blocks: first blocks, never wanted; candidates start after them.
        window_blocks: closed blocks after the candidates, never wanted.
        steps: steps.
        changes: blocks that became wanted or stopped being so, over steps, layers and KV heads.
        recording: the run.
        replay: None for a recording as it is.

    """

    format: Literal["oasiskv-trace"] = "oasiskv-trace"
    version: Literal[1] = 1
    written_by: Words
    layers: Size
    kv_heads: Size
    block_tokens: Size
    budget_blocks: Size
    sink_blocks: Annotated[int, Field(ge=0, le=2**24)]
    window_blocks: Annotated[int, Field(ge=0, le=2**24)]
    steps: Steps
    changes: Count
    recording: Recording
    replay: Replay | None = None

    @property
    def rows(self) -> int:
        """Layers × KV heads."""
        return self.layers * self.kv_heads

    @property
    def body_bytes(self) -> int:
        """Bytes of the body, unpacked."""
        return NUMBER_BYTES * (2 * self.steps + self.steps * self.rows + self.changes)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.body_bytes > MAX_BODY_BYTES:
            raise ValueError(f"a body of {self.body_bytes} bytes: at most {MAX_BODY_BYTES}")
        if self.rows * self.budget_blocks > MAX_TILES:
            raise ValueError(f"{self.rows} rows of {self.budget_blocks}: at most {MAX_TILES} tiles")
        return self


def parse_header(line: bytes, what: str) -> Header:
    """The header from the first line of a trace file.

    Args:
        line: the line, without its end.
        what: the file's name, for errors.

    Raises:
        TraceError: the first fault found.
    """
    try:
        return Header.model_validate_json(line)
    except ValidationError as error:
        raise TraceError(
            f"{what} is no trace that this version reads: {_describe(error)}"
        ) from None


def _describe(error: ValidationError) -> str:
    """One line for the first fault that pydantic found."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in fault["loc"]) or "the header"
    return f"{name[:100]}: {' '.join(fault['msg'].split())[:200]}"
