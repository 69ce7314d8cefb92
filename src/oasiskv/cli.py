"""The command line: ``oasiskv generate | serve | top | models | eval | bench | trace``."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from oasiskv.bench.cli import app as bench_app
from oasiskv.config import OasisConfig
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.verify import Sampling
from oasiskv.errors import OasisError, PromptError
from oasiskv.evals.cli import app as eval_app
from oasiskv.generation import generate as run_generate
from oasiskv.hf.choices import DraftKind, Dtype, draft_source
from oasiskv.hf.loading import load_model, pick_device
from oasiskv.hf.tokens import encode, load_tokenizer
from oasiskv.models.cli import app as models_app
from oasiskv.models.resolve import resolve_model
from oasiskv.options import Device, or_none
from oasiskv.trace.cli import app as trace_app

# typer keeps its copy of click private; what it raises on bad usage is the base of BadParameter.
_UsageError = cast(type[Exception], typer.BadParameter.__bases__[0])

# What shells give for a command ended by Ctrl-C, and what typer returns for it.
_INTERRUPTED = 130

app = typer.Typer(
    help="Decode with the KV cache outside fast memory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(models_app, name="models", help="List and fetch the built-in models.")
app.add_typer(eval_app, name="eval", help="Measure accuracy and traffic.")
app.add_typer(bench_app, name="bench", help="Measure what fits in a KV pool, and the speed of ops.")
app.add_typer(trace_app, name="trace", help="Wanted blocks of real runs: record, show, replay.")


class DigestKind(StrEnum):
    """What a block is scored by."""

    MINMAX = "minmax"
    KEYS4 = "keys4"


@app.callback()
def _root() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@app.command()
def generate(
    prompt_file: Annotated[Path, typer.Option(help="text to continue; - reads standard input")],
    model: Annotated[str, typer.Option(help="built-in name, folder or hub id")] = "smollm2-135m",
    budget: Annotated[int, typer.Option(help="K: wanted tokens per step, layer, KV head")] = 1024,
    hot: Annotated[int, typer.Option(help="S: tokens of the hot set")] = 1536,
    sink: Annotated[int, typer.Option(help="first tokens, always in the fast tier")] = 16,
    window: Annotated[int, typer.Option(help="most recent tokens, always in the fast tier")] = 64,
    threshold: Annotated[
        int | None,
        typer.Option(
            help="tokens past which decoding is sparse; none: sink + hot + window + a block",
            parser=or_none(int),
            metavar="INTEGER|none",
        ),
    ] = None,
    dense: Annotated[bool, typer.Option("--dense", help="never go sparse")] = False,
    lookahead: Annotated[LookaheadMode, typer.Option()] = LookaheadMode.HELD_BACK,
    draft: Annotated[DraftKind, typer.Option()] = DraftKind.NGRAM,
    assistant: Annotated[
        str | None, typer.Option(help="smaller model for --draft assistant")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(help="most drafts in one step")] = 4,
    digest: Annotated[DigestKind, typer.Option()] = DigestKind.KEYS4,
    hysteresis: Annotated[float, typer.Option(help="score factor of resident blocks")] = 2.0,
    cap: Annotated[
        float | None,
        typer.Option(
            help="most fetched per step, share of the budget; none: all of it",
            parser=or_none(float),
            metavar="FLOAT|none",
        ),
    ] = 0.1,
    host_gib: Annotated[float | None, typer.Option(help="size of the host store")] = None,
    max_new_tokens: Annotated[int, typer.Option()] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="wrap in the chat template")] = False,
    device: Device = None,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.FLOAT32,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object only")] = False,
    plot: Annotated[Path | None, typer.Option(help="picture of hits and traffic")] = None,
) -> None:
    """Continue a text while only a fixed hot set of its KV is in the fast tier."""
    config = OasisConfig(
        mode="dense" if dense else "always",
        budget_tokens=budget,
        hot_tokens=hot,
        sink_tokens=sink,
        window_tokens=window,
        threshold_tokens=threshold,
        digest=digest.value,
        hysteresis=hysteresis,
        cap_fraction=cap,
        lookahead=lookahead,
        draft_tokens=draft_tokens,
        host_gib=host_gib,
    )
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    text = _read_prompt(prompt_file)
    folder = resolve_model(model)
    loaded = load_model(folder, dtype.torch_dtype, pick_device(device))
    tokenizer = load_tokenizer(folder)
    drafts = draft_source(draft, assistant, loaded)
    prompt = encode(tokenizer, text, chat)
    report = run_generate(
        loaded,
        tokenizer,
        config,
        prompt,
        max_new_tokens,
        drafts,
        sampling,
        on_text=(lambda piece: None) if as_json else _Printer(model, len(prompt), text),
    )
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        sys.stdout.write("\n")
        Console().print(report.as_table())
    if plot is not None:
        report.plot(plot)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="built-in name, folder or hub id")],
) -> None:
    """vLLM's OpenAI server with OasisKV; --help lists its settings and says where vLLM's are."""
    from oasiskv.vllm.serve import serve as run_server

    run_server(model, context.args)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="of a server with OasisKV")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.2, help="seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one table and end")] = False,
) -> None:
    """A server's metrics at the terminal, until Ctrl-C."""
    from oasiskv.top.command import run_top

    run_top(url, interval, once, Console())


def main() -> NoReturn:
    """Entry point: an error of the user's making is one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except OasisError as error:
        _fail(str(error))
    except _UsageError as error:
        _fail(cast(Any, error).format_message())
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        sys.stderr.write("\ninterrupted\n")
    sys.exit(code or 0)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"oasiskv: error: {' '.join(message.split())}\n")
    sys.exit(2)


class _Printer:
    """Prints text as it comes; before the first piece, what it answers."""

    def __init__(self, model: str, prompt_tokens: int, prompt: str) -> None:
        end = prompt.strip()[-120:].splitlines()
        self._header = f"{model}, {prompt_tokens} prompt tokens ending in: {' / '.join(end[-2:])}\n"

    def __call__(self, piece: str) -> None:
        sys.stdout.write(self._header + piece)
        sys.stdout.flush()
        self._header = ""


def _read_prompt(path: Path) -> str:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompt file {path}: {error}") from error
    if not text.strip():
        raise PromptError(f"the prompt file {path} is empty: it must hold text to continue")
    return text
