"""Rules of what is saved and loaded: they look at the folders, and change nothing. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.find import list_checkpoints, open_checkpoint
from mcore_ckpt.manifest import CheckpointInfo
from mcore_ckpt.stores import checkpoint_root, store_registry
from mcore_cli.rules.engine import Context, Rule, Violation
from mcore_parallel.optim.lr_schedule import ScheduleState, build_schedule, reconcile
from mcore_parallel.plugins import PluginManager

Locate = Callable[[str], Path]

# Fields that decide the shapes of weights; the others may change between a checkpoint and the run that loads it.
SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_size",
    "ffn_size",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "disable_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)
FLAG_OF = {"num_kv_heads": "num_query_groups", "head_size": "kv_channels", "ffn_size": "ffn_hidden_size"}


def choices_agree(locate: Locate, context: Context) -> Violation | None:
    """Starting afresh, resuming the newest and loading a named place exclude each other."""
    checkpoint = context.config.checkpoint
    wanted = {
        f"--load {checkpoint.load}": checkpoint.load is not None,
        "--auto-resume": checkpoint.auto_resume,
        "--overwrite": checkpoint.overwrite and (checkpoint.auto_resume or _loads_from_save(locate, context)),
    }
    given = [name for name, is_given in wanted.items() if is_given]
    if len(given) < 2:
        return None
    return Violation(
        "resume-choice",
        " with ".join(given),
        "one loads a named place, one the newest checkpoint in --save, one removes what is in --save",
        "keep one of them",
    )


def _loads_from_save(locate: Locate, context: Context) -> bool:
    """Whether what ``--load`` names is the folder of ``--save``, or inside it."""
    load, save = context.config.checkpoint.load, context.config.checkpoint.save
    if load is None or save is None:
        return False
    try:
        source, target = locate(load).resolve(), locate(save).resolve()
    except (ValueError, OSError):
        return False  # told by the rules of each
    return source.is_relative_to(target)


def schedule_source(context: Context) -> Violation | None:
    """On resume, the schedule comes from the flags or from the checkpoint."""
    optimizer = context.config.optimizer
    if not (optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler):
        return None
    return Violation(
        "schedule-source",
        "--override-opt_param-scheduler with --use-checkpoint-opt_param-scheduler",
        "the first takes the schedule from the flags, the second from the checkpoint",
        "keep one of them",
    )


def save_is_free(locate: Locate, context: Context) -> Violation | None:
    """A run does not start into a folder of checkpoints unless it is told what to do with them."""
    checkpoint = context.config.checkpoint
    if checkpoint.save is None:
        return None
    try:
        found = list_checkpoints(locate(checkpoint.save))
    except (ValueError, OSError) as error:
        return Violation("save", f"--save {checkpoint.save}", str(error), "give another folder")
    if not found:
        return _writable(locate(checkpoint.save), checkpoint.save)
    if checkpoint.auto_resume or checkpoint.overwrite or _continues(locate, context, found[-1].step):
        return None
    if checkpoint.load is not None:
        return Violation(
            "save-in-use",
            f"--save {checkpoint.save} with --load {checkpoint.load}",
            f"it holds checkpoints up to iteration {found[-1].step}, which this run does not continue: the next "
            "--auto-resume would take the wrong ones",
            "give another --save",
        )
    return Violation(
        "save-in-use",
        f"--save {checkpoint.save}",
        f"it holds {len(found)} checkpoint{'s' if len(found) > 1 else ''} (newest: iteration {found[-1].step})",
        f"resume with --load {checkpoint.save} or --auto-resume, start over with --overwrite, or give another --save",
    )


def _continues(locate: Locate, context: Context, newest: int) -> bool:
    """Whether the run goes on from the newest checkpoint in its own folder."""
    info = _found(locate, context)
    if info is None:
        # A --load that names nothing is told by its own rule.
        return context.config.checkpoint.load is not None
    fresh = context.config.checkpoint.finetune
    return not fresh and info.step == newest and _loads_from_save(locate, context)


def _writable(folder: Path, given: str) -> Violation | None:
    """The folder, or the nearest above it that exists, takes new files."""
    exists = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if exists.is_dir() and os.access(exists, os.W_OK):
        return None
    reason = f"{exists} cannot be written to" if exists.is_dir() else f"{exists} is no folder"
    return Violation("save", f"--save {given}", reason, "give a folder that can be written to")


def load_is_there(locate: Locate, context: Context) -> Violation | None:
    """--load names a complete checkpoint: nothing there is an error, never a silent fresh start."""
    checkpoint = context.config.checkpoint
    if checkpoint.load is None:
        return None
    try:
        _open(locate, context)
    except (ValueError, OSError) as error:
        step = "" if checkpoint.ckpt_step is None else f" --ckpt-step {checkpoint.ckpt_step}"
        return Violation(
            "load",
            f"--load {checkpoint.load}{step}",
            str(error),
            "give a folder with checkpoints, or drop it to start fresh (--auto-resume is for requeued jobs: the newest "
            "checkpoint in --save if there is one, else a fresh start)",
        )
    return None


def optimizer_is_there(locate: Locate, context: Context) -> Violation | None:
    """Resuming needs optimizer state, unless it is left out on purpose."""
    checkpoint = context.config.checkpoint
    info = _found(locate, context)
    if info is None or checkpoint.finetune or checkpoint.no_load_optim:
        return None
    if info.state.get("optimizer", {}).get("saved", True):
        return _optimizers_agree(info, context)
    return Violation(
        "load-optimizer",
        f"--load {checkpoint.load}",
        f"the checkpoint of iteration {info.step} was saved with --no-save-optim",
        "add --no-load-optim, or --finetune to start at iteration 0",
    )


def _optimizers_agree(info: CheckpointInfo, context: Context) -> Violation | None:
    """Optimizer state is that of one optimizer, with master weights for 16-bit models only."""
    config = context.config
    try:
        saved = info.state["config"]["optimizer"]["optimizer"], info.state["config"]["model"]["bf16"]
    except KeyError:
        return None  # written by something else than a run
    now = config.optimizer.optimizer, config.model.bf16
    if saved == now:
        return None
    words = [f"--optimizer {name}{' --bf16' if half else ' without --bf16'}" for name, half in (now, saved)]
    return Violation(
        "load-optimizer",
        words[0],
        f"the optimizer state in {info.path} is of {words[1]}",
        "add --no-load-optim to start the state anew, --finetune to start at iteration 0, or keep both",
    )


def seed_agrees(locate: Locate, context: Context) -> Violation | None:
    """Dropout and sample order go on as they began, unless the seed is changed on purpose."""
    info, checkpoint = _found(locate, context), context.config.checkpoint
    if info is None or checkpoint.finetune or checkpoint.no_load_rng:
        return None
    saved = info.state.get("seed")
    if saved is None or saved == context.config.train.seed:
        return None
    return Violation(
        "resume-seed",
        f"--seed {context.config.train.seed}",
        f"the checkpoint {info.path} has {saved}: dropout and sample order would change",
        f"give --seed {saved}, or --no-load-rng to go on with the new one",
    )


def schedule_agrees(locate: Locate, context: Context) -> Violation | None:
    """The learning-rate schedule goes on as it began, unless it is changed on purpose."""
    info, config, step = _found(locate, context), context.config, context.samples_per_micro_step
    if info is None or config.checkpoint.finetune or step is None or "schedule" not in info.state:
        return None
    try:
        now = build_schedule(
            config.optimizer,
            train_iters=config.train.train_iters,
            train_samples=config.train.train_samples,
            global_batch_size=config.train.global_batch_size or step,
        )
    except ValueError:
        return None  # told by the rules of schedules
    options = config.optimizer
    try:
        reconcile(
            now,
            ScheduleState.from_dict(info.state["schedule"]),
            override=options.override_opt_param_scheduler,
            use_checkpoint=options.use_checkpoint_opt_param_scheduler,
        )
    except ValueError as error:
        return Violation("resume-schedule", f"--load {config.checkpoint.load}", str(error), "or use its values")
    return None


def shapes_agree(locate: Locate, context: Context) -> Violation | None:
    """The model is that of the checkpoint."""
    info = _found(locate, context)
    if info is None:
        return None
    model = context.config.model
    saved = _saved_model(info.state, type(model))
    if saved is None:
        return None
    differing = [name for name in SHAPE_FIELDS if getattr(saved, name) != getattr(model, name)]
    if not differing:
        return None
    flags = {name: "--" + FLAG_OF.get(name, name).replace("_", "-") for name in differing}
    return Violation(
        "load-shape",
        ", ".join(f"{flags[name]} {getattr(model, name)}" for name in differing),
        f"the checkpoint {info.path} has {', '.join(f'{flags[name]} {getattr(saved, name)}' for name in differing)}",
        "use the values of the checkpoint",
    )


def _saved_model(state: Mapping[str, Any], section: type[Any]) -> Any:
    try:
        return section.model_validate(state["config"]["model"])
    except (KeyError, ValueError):
        return None  # written by something else than a run: loading compares every array's shape in any case


def _found(locate: Locate, context: Context) -> CheckpointInfo | None:
    """The checkpoint to load, None if there is none to load or :func:`load_is_there` complains about it."""
    if context.config.checkpoint.load is None:
        return None
    try:
        return _open(locate, context)
    except (ValueError, OSError):
        return None


def _open(locate: Locate, context: Context) -> CheckpointInfo:
    checkpoint = context.config.checkpoint
    assert checkpoint.load is not None
    return open_checkpoint(locate(checkpoint.load), checkpoint.ckpt_step)


def checkpoint_rules(manager: PluginManager) -> tuple[Rule, ...]:
    """The rules, with the stores that are registered."""
    locate = partial(checkpoint_root, stores=store_registry(manager))
    return (
        Rule("resume-choice", partial(choices_agree, locate)),
        Rule("schedule-source", schedule_source),
        Rule("save-in-use", partial(save_is_free, locate)),
        Rule("load", partial(load_is_there, locate)),
        Rule("load-optimizer", partial(optimizer_is_there, locate)),
        Rule("resume-seed", partial(seed_agrees, locate)),
        Rule("resume-schedule", partial(schedule_agrees, locate)),
        Rule("load-shape", partial(shapes_agree, locate)),
    )
