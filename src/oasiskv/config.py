"""Every setting of OasisKV, with units, validated; unknown keys are refused."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.errors import ConfigError

BLOCK_TOKENS = 16
"""Tokens of one block, the unit of selection and transfer."""

# Far beyond any that make sense: what is larger is a slip, and would overflow somewhere later.
_MOST_TOKENS = 2**30
_MOST_HYSTERESIS = 10**6
_MOST_TIMEOUT_S = 86400
# What a process can address on x86-64.
_MOST_GIB = 2**17

# Characters of a value that an error shows.
_MOST_SHOWN = 80


class OasisConfig(BaseModel):
    """Settings of the sparse path; immutable.

    Sizes in tokens are multiples of the block (16 tokens). ``budget_tokens`` is K of the docs and
    ``hot_tokens`` is S, both per layer and KV head.

    Raises:
        ConfigError: an unknown setting, or a value that is not legal; names the setting, the
            value and what would be legal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mode: Literal["always", "under_pressure", "dense"] = Field(
        "always",
        description="always: go sparse past the threshold; under_pressure (vLLM only): past it and "
        "only while the fast tier is short of blocks; dense (reference engine only): never",
    )
    budget_tokens: int = Field(
        2048, le=_MOST_TOKENS, description="K: tokens wanted per step, layer and KV head"
    )
    hot_tokens: int = Field(
        3072, le=_MOST_TOKENS, description="S: tokens the hot set holds per layer and KV head"
    )
    sink_tokens: int = Field(
        16, le=_MOST_TOKENS, description="first tokens, always in the fast tier"
    )
    window_tokens: int = Field(
        64,
        le=_MOST_TOKENS,
        description="most recent closed tokens always in the fast tier, beside the open block",
    )
    threshold_tokens: int | None = Field(
        None,
        ge=0,
        le=_MOST_TOKENS,
        description="context length past which a request goes sparse; None: sink + hot + window "
        "+ one block",
    )
    digest: Literal["minmax", "keys4"] = Field(
        "keys4", description="what a block is scored by: min and max of its keys, or 4-bit keys"
    )
    minmax_mix: float = Field(
        0.5, ge=0, le=1, description="weight of the spread in a min/max score; 1 is Quest's bound"
    )
    hysteresis: float = Field(
        2.0,
        ge=1,
        le=_MOST_HYSTERESIS,
        description="factor on the score of a block that is already in a slot",
    )
    cap_fraction: float | None = Field(
        0.1,
        gt=0,
        le=1,
        description="most blocks fetched per step, layer and KV head, as a share of the budget "
        "(at least one block); None: no cap but the budget",
    )
    lookahead: LookaheadMode = Field(
        LookaheadMode.HELD_BACK, description="which query predicts the next step's blocks"
    )
    draft_tokens: int = Field(4, ge=1, le=64, description="most draft tokens fed in one step")
    prefill_tokens: int = Field(
        512,
        ge=1,
        le=_MOST_TOKENS,
        description="most prompt tokens of one request computed in one step",
    )
    host_gib: float | None = Field(
        None,
        gt=0,
        le=_MOST_GIB,
        description="size of the host store, GiB; with tensor parallelism of all ranks' together, "
        "in equal parts; None: what the requests at hand need",
    )
    transfer_timeout_s: float = Field(
        30.0,
        gt=0,
        le=_MOST_TIMEOUT_S,
        description="seconds after which a transfer that is waited for has failed",
    )
    checksums: bool = Field(
        False,
        description="keep a checksum of each tile in the host store, and leave out a fetched tile "
        "that does not match its own; not on CUDA in vLLM",
    )

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - pydantic's own signature
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(_describe(error)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some settings changed, validated like a new one (pydantic's is not).

        What was left to its default still counts as left out.
        """
        return type(self)(**{**self.model_dump(exclude_unset=True), **(update or {})})

    @model_validator(mode="after")
    def _check_sizes(self) -> "OasisConfig":
        for name, least in (
            ("budget_tokens", BLOCK_TOKENS),
            ("hot_tokens", BLOCK_TOKENS),
            ("sink_tokens", 0),
            ("window_tokens", BLOCK_TOKENS),
        ):
            value = getattr(self, name)
            if value < least or value % BLOCK_TOKENS:
                raise ConfigError(
                    f"{name}={value} is not legal: it must be a multiple of the block "
                    f"({BLOCK_TOKENS} tokens), at least {least}"
                )
        if self.hot_tokens < self.budget_tokens:
            raise ConfigError(
                f"hot_tokens={self.hot_tokens} is not legal: the hot set must hold the budget, "
                f"so at least budget_tokens={self.budget_tokens}"
            )
        return self

    @property
    def budget_blocks(self) -> int:
        """K: blocks wanted per step, layer and KV head."""
        return self.budget_tokens // BLOCK_TOKENS

    @property
    def hot_blocks(self) -> int:
        """S: slots per layer and KV head."""
        return self.hot_tokens // BLOCK_TOKENS

    @property
    def sink_blocks(self) -> int:
        """Blocks of the sink."""
        return self.sink_tokens // BLOCK_TOKENS

    @property
    def window_blocks(self) -> int:
        """Closed blocks of the window; the open block comes on top."""
        return self.window_tokens // BLOCK_TOKENS

    @property
    def cap_blocks(self) -> int:
        """Most blocks fetched per step, layer and KV head."""
        if self.cap_fraction is None:
            return self.budget_blocks
        return max(1, int(self.cap_fraction * self.budget_blocks))

    @property
    def resolved_threshold_tokens(self) -> int:
        """Context length past which a request goes sparse."""
        if self.threshold_tokens is not None:
            return self.threshold_tokens
        return self.sink_tokens + self.hot_tokens + self.window_tokens + BLOCK_TOKENS


def _describe(error: ValidationError) -> str:
    """One line for the first fault that pydantic found."""
    fault = error.errors()[0]
    name = ".".join(str(part) for part in fault["loc"]) or "settings"
    found = repr(fault["input"])
    if len(found) > _MOST_SHOWN:
        found = f"{found[:_MOST_SHOWN]}..."
    if fault["type"] == "extra_forbidden":
        legal = ", ".join(sorted(OasisConfig.model_fields))
        text = f"unknown setting {name}={found}; known settings: {legal}"
    else:
        legal = fault["msg"].replace("Input should", "it must")
        text = f"{name}={found} is not legal: {legal}"
    return " ".join(text.splitlines())
