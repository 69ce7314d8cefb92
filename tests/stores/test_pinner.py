"""How the CUDA runtime is called, and what becomes of its error codes."""

from types import SimpleNamespace

from oasiskv.stores.pinner import CudaPinner


def make(code):
    calls = []

    def note(name):
        return lambda *arguments: calls.append((name, *arguments)) or code

    runtime = SimpleNamespace(
        cudaHostRegister=note("register"),
        cudaHostUnregister=note("unregister"),
        cudaGetErrorString=lambda code: f"text of {code}",
    )
    return CudaPinner(0, runtime), calls


def test_success():
    pinner, calls = make(0)
    assert pinner.register(4096, 8192) is None
    assert pinner.unregister(4096) is None
    assert calls == [("register", 4096, 8192, 0), ("unregister", 4096)]


def test_an_error_is_told_by_text_and_number():
    pinner, _ = make(2)
    assert pinner.register(4096, 8192) == "text of 2 (CUDA error 2)"
    assert pinner.unregister(4096) == "text of 2 (CUDA error 2)"
