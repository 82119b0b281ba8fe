"""Loss and perplexity of a checkpoint on validation data, on any layout."""

from __future__ import annotations

import math
from contextlib import closing

from mcore_ckpt.find import open_checkpoint
from mcore_cli.build import build_parts, build_run_tokenizer, build_validation, global_batch_size, with_vocabulary
from mcore_cli.checkpointing import checkpoint_folder, chosen_by_first, load_weights
from mcore_cli.config import RunConfig
from mcore_cli.step import Parts, forward_all, sum_over_ranks
from mcore_cli.world import build_run_layout, join_world
from mcore_data.loader import GlobalBatchLoader
from mcore_parallel.plugins import plugin_manager


def validation_loss(parts: Parts, data: GlobalBatchLoader, *, num_batches: int) -> tuple[float, float]:
    """Summed loss and number of valid tokens of the first ``num_batches`` global batches of the validation ``data``.

    Always the same samples, without dropout; leaves no mark on the parts. Collective.
    """
    batch = global_batch_size(parts.config, parts.layout.axis("dp").size)
    loss = tokens = 0.0
    for index in range(num_batches):
        batches = data.micro_batches(index * batch)
        sums = sum_over_ranks(parts.layout, forward_all(parts, batches), batches, device=parts.device)
        loss, tokens = loss + sums.loss, tokens + sums.tokens
    return loss, tokens


def perplexity(mean_loss: float) -> float:
    """``exp`` of the mean token loss (infinite where a float cannot hold it)."""
    return math.exp(mean_loss) if mean_loss < 709 else math.inf


def run(config: RunConfig) -> None:
    """Evaluate ``config.checkpoint.load`` on the validation split and print the result on rank 0."""
    with join_world(config) as world:
        manager = plugin_manager()
        tokenizer = build_run_tokenizer(config, manager)
        config = with_vocabulary(config, tokenizer)
        layout = build_run_layout(config, world, manager=manager)
        parts = build_parts(config, layout, manager=manager, device=world.device)
        assert config.checkpoint.load is not None, "mcore eval asks for --load"
        folder, step = checkpoint_folder(config.checkpoint.load, manager), config.checkpoint.ckpt_step
        info = chosen_by_first(lambda: open_checkpoint(folder, step))
        load_weights(parts.chunks, info)
        with closing(build_validation(config, tokenizer, layout, manager=manager)) as data:
            loss, tokens = validation_loss(parts, data, num_batches=config.train.eval_iters)
        if world.is_first:
            mean = loss / max(tokens, 1.0)
            print(
                f"{info.path} on {int(tokens):,} validation tokens: loss {mean:.4f}, perplexity {perplexity(mean):.2f}"
            )
