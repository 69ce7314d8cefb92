"""The reference engine on Hugging Face transformers: it defines what is right."""

from oasiskv.hf.engine import Engine, StepOutput, StepRecord
from oasiskv.hf.loading import LoadedModel, load_model, wrap_model

__all__ = ["Engine", "LoadedModel", "StepOutput", "StepRecord", "load_model", "wrap_model"]
