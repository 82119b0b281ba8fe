"""Where checkpoints go and come from. Field names are Megatron's. No torch."""

from __future__ import annotations

from pydantic import Field

from mcore_parallel.config import Section


class CheckpointConfig(Section):
    """Saving, resuming and what to load."""

    save: str | None = Field(
        None, min_length=1, description="Folder (or store URL) for checkpoints; default runs/NAME."
    )
    load: str | None = Field(None, min_length=1, description="Folder to resume from; loading nothing is an error.")
    save_interval: int | None = Field(None, ge=1, description="Iterations between checkpoints; default: at the end.")
    ckpt_step: int | None = Field(None, ge=0, description="Load this iteration instead of the newest.")
    auto_resume: bool = Field(
        False,
        description="Resume the newest checkpoint in --save if there is one, else start fresh; for requeued jobs.",
    )
    overwrite: bool = Field(False, description="Start fresh although --save holds checkpoints; they are removed first.")
    finetune: bool = Field(False, description="Load weights only and start at iteration 0.")
    no_load_optim: bool = Field(False, description="Do not load optimizer states.")
    no_load_rng: bool = Field(False, description="Do not take the seed of the checkpoint.")
    no_save_optim: bool = Field(False, description="Do not save optimizer states.")
